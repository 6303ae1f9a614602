"""Mixtures of experts on a simulated GPU: the text of a CPU, and few launches that are planned."""

from pathlib import Path

import pytest

from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.survey import survey
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.planning.step_costs import KERNELS_OF_PASS
from tests.support.checkpoints import write_checkpoint
from tests.support.launching import settings_of, text
from tests.support.quantized_checkpoints import quantize
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.steps import counts_of_step

pytestmark = needs_compiler
MIXTURES = ("mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss")
QUICK = [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "gpt_oss")) for kind in MIXTURES]


@pytest.mark.parametrize("kind", QUICK)
def test_text_on_a_gpu_is_that_of_a_cpu(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind, num_hidden_layers=2)
    with simulated_cuda():
        found = text(settings_of(folder, device="cuda"))
    assert found == text(settings_of(folder, device="cpu"))


@pytest.mark.slow
def test_text_of_stored_experts_on_a_gpu_is_that_of_their_numbers(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", "qwen3_moe", num_hidden_layers=2)
    quantized, meant = quantize(plain, "fp8", tmp_path)
    with simulated_cuda():
        found = text(settings_of(quantized, device="cuda"))
    assert found == text(settings_of(meant, device="cpu"))


# The survey of an engine with graphs captures each of them in the interpreter.
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_step_on_a_gpu_tells_the_share_of_experts_that_it_read(graphs: bool, tmp_path: Path) -> None:
    """A graph's rows of padding choose experts too, so three rows may read more than they chose."""
    folder = write_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=2)
    with simulated_cuda():
        engine = Engine.from_settings(settings_of(folder, device="cuda", graphs=graphs, max_sequences=2))
        steps = [step for step in survey(engine)[""] if not step.size.prompt_tokens]
    assert {step.experts_read for step in steps if step.size.tokens == 1} == {2 / 8}
    assert all(2 / 8 <= step.experts_read <= 1.0 for step in steps)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", MIXTURES)
def test_pass_launches_the_kernels_that_are_planned(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind, num_hidden_layers=2)
    settings = settings_of(folder, device="cuda", dtype="bfloat16", self_check=False)
    sampling = Sampling(temperature=0.0, max_tokens=64)
    with simulated_cuda():
        counts = counts_of_step(Engine.from_settings(settings), 1, 1, sampling)
    assert counts.launches.total() == skeleton(settings).layer_kernels() + KERNELS_OF_PASS, counts.report()
