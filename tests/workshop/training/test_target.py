"""Products in bfloat16: where a processor has them."""

import pytest
import torch

from workshop.training.target import has_bfloat16


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx2": True}, False),
    ],
)
def test_has_bfloat16_on_a_cpu_asks_for_its_instructions(
    capabilities: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert has_bfloat16(torch.device("cpu")) == expected


def test_has_bfloat16_on_a_gpu_is_true() -> None:
    assert has_bfloat16(torch.device("cuda"))
