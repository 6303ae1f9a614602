"""Ranks run their shares through the decoder, and compute what one process computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from outrider.engine.forward.decoder import Decoder
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import ARCHITECTURES, VOCAB_SIZE, write_checkpoint
from tests.support.decoder_steps import BLOCK_SIZE, steps_logits
from tests.support.functions import needs_functions
from tests.support.ranks import Ranks

# The vocabulary of Qwen 2 is one token too large to share evenly.
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True, "vocab_size": VOCAB_SIZE + 1},
    "qwen3": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "glm4_moe": {},
    "mixtral": {},
    "minimax_m2": {},
    "gpt_oss": {},
}
# Rounding chooses between two experts of this model, so the self-check leaves the decoder out.
NEARLY_TIED = "minimax_m2", "bfloat16"
MIXTURES = [kind for kind in FAMILY if "num_experts_per_tok" in ARCHITECTURES[kind]]
FIELDS: list[tuple[dict[str, Any], tuple[str, ...], list[pytest.MarkDecorator]]] = [
    # settings, kinds of the quick suite, what they need
    ({"dtype": "float32"}, (*FAMILY,), []),
    ({"dtype": "bfloat16"}, ("llama", "glm4_moe"), []),
    ({"dtype": "float32", "batch_invariant": True}, ("qwen2", "qwen3_moe"), [needs_functions]),
    ({"dtype": "float32", "quantization": "int8"}, ("qwen3", "qwen2_moe"), []),
]
CASES = [
    pytest.param(kind, fields, marks=[*needs, *[pytest.mark.slow] * (kind not in quick)])
    for fields, quick, needs in FIELDS
    for kind in FAMILY
    if (kind, fields["dtype"]) != NEARLY_TIED
]


def write_model(folder: Path, kind: str) -> Path:
    """Writes a checkpoint whose biases are random too."""
    write_checkpoint(folder, kind, **FAMILY[kind])
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("bias", "sinks")):
            weight.normal_(0, 0.15)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def settings_of(folder: Path, ranks: int, **fields: Any) -> EngineSettings:
    given = {"model": str(folder), "block_size": BLOCK_SIZE, "cache_memory": 2**20, "threads": 1}
    return EngineSettings.model_validate({**given, "tensor_parallel": ranks, **fields})


@contextmanager
def counted_passes() -> Iterator[list[Decoder]]:
    """Yields the list of decoders that computed a pass, in their order."""
    used: list[Decoder] = []
    compute = Decoder.__call__

    def noted(self: Decoder, *arguments: Any) -> Any:
        used.append(self)
        return compute(self, *arguments)

    with patch.object(Decoder, "__call__", noted):
        yield used


def logits_and_passes(group: RankGroup, settings: EngineSettings) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns this rank's logits by the decoder and by its layers, and the number of the decoder's passes."""
    with counted_passes() as used:
        forward = load_forward_pass(settings, group)
        used.clear()  # the self-check is not what counts
        by_decoder, passes = steps_logits(forward), len(used)
        with patch("outrider.engine.loop.forward_pass.decoder_of", lambda *_: None):
            by_layers = steps_logits(load_forward_pass(settings, group))
        assert len(used) == passes
    return by_decoder, by_layers, passes


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("kind", "fields"), CASES, ids=str)
def test_decoder_of_two_ranks_computes_what_their_layers_compute(
    ranks: Ranks, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    check(ranks, settings_of(write_model(tmp_path / kind, kind), 2, **fields))


@pytest.mark.slow  # four processes
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_decoder_of_four_ranks_with_repeated_heads_computes_what_their_layers_compute(
    four_ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    check(four_ranks, settings_of(write_model(tmp_path / kind, kind), 4, dtype="float32"))


def check(ranks: Ranks, settings: EngineSettings) -> None:
    found = ranks.run(logits_and_passes, logits_and_passes, settings)
    assert len(found) == settings.tensor_parallel
    # An input of 8 bits that is rounded the other way is off by a whole step.
    is_exact = settings.dtype == "float32" and settings.quantization is None
    for by_decoder, by_layers, passes in found:
        assert passes == found[0][2] > 0
        errors = (by_decoder - by_layers).abs().amax(1)
        # If experts nearly tie, rounding chooses between them, and such a row may differ by any amount.
        largest = errors.max() if is_exact or Path(settings.model).name not in MIXTURES else errors.median()
        assert largest < (2e-4 if is_exact else 0.05) * by_layers.abs().max()


def passes_where_one_rank_is_wrong(group: RankGroup, settings: EngineSettings, wrong: int) -> tuple[int, int]:
    """Returns how many passes the decoder computed in the self-check and after it.

    The wrong rank gets its own share of the logits wrong, which other ranks than rank 0 do not see.
    """
    normed = Decoder._normed

    def doubled(self: Decoder, states: torch.Tensor) -> torch.Tensor:
        return normed(self, states) * (2 if dist.get_rank() == wrong else 1)

    with counted_passes() as used, patch.object(Decoder, "_normed", doubled):
        forward = load_forward_pass(settings, group)
        checked = len(used)
        steps_logits(forward)
    return checked, len(used) - checked


@pytest.mark.parametrize("wrong", range(2))
def test_decoder_that_is_wrong_at_one_rank_is_used_at_no_rank(
    ranks: Ranks, tmp_path: Path, wrong: int
) -> None:
    settings = settings_of(write_checkpoint(tmp_path, "llama"), 2)
    work = passes_where_one_rank_is_wrong
    for in_check, after in ranks.run(work, work, settings, wrong):
        assert in_check > 0
        assert after == 0
