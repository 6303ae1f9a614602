"""Scripts for a lent GPU run from end to end, by their smallest shapes."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outrider.engine.forward.graphs
from bench.on_device import device_steps, pair
from bench.on_device import engine as engine_script
from bench.on_device.figures import Figures
from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.gpu import gpu as any_gpu
from tests.support.simulated_cuda.install import needs_compiler

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 512  # tokens of the tiny shape
TOKENS = 40  # tokens of an answer


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    pair.main([str(folder), "--device", "cpu", "--shapes", "tiny", "tiny"])
    return folder


def told(script: Any, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Figures that a script tells."""
    script.main(["--out", str(folder), *arguments])
    (file,) = folder.glob("*.jsonl")
    return figures_in(file)


def figures_in(file: Path) -> list[dict[str, Any]]:
    """Figures of a file, without the facts of the run in its first line."""
    run, *figures = map(json.loads, file.read_text().splitlines())
    assert run["machine"]["cores"]
    return figures


def engine(folder: Path) -> Engine:
    settings = EngineSettings(model=str(folder), device="cpu", cache_memory=2**22, threads=1)
    return Engine.from_settings(settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pair_with_drafts_accepts_exactly_what_is_known_before(tiny_pair: Path, temperature: float) -> None:
    target, draft = engine(tiny_pair / "target"), engine(tiny_pair / "draft")
    sampling = Sampling(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    prompts = [pair.prompt(number, 8, VOCAB_SIZE) for number in range(6)]
    requests = [OfflineRequest((*tokens,), sampling, number) for number, tokens in enumerate(prompts)]
    for prompt, output in zip(prompts, generate(target, DraftModel(draft), requests, 4), strict=True):
        assert [*output.tokens] == pair.text(prompt[-1], TOKENS, VOCAB_SIZE)
        expected, length = 0, 0
        while length < TOKENS:
            after = (prompt[-1] + length) % VOCAB_SIZE
            expected += (found := min(pair.accepted(after, 4, VOCAB_SIZE), TOKENS - length - 1))
            length += found + 1
        assert output.accepted == expected


def test_pair_share_of_correct_tokens_is_the_acceptance() -> None:
    is_correct = pair.draft_follows(VOCAB_SIZE) == pair.target_follows(VOCAB_SIZE)
    assert is_correct.mean() == pytest.approx(pair.ACCEPTANCE, abs=1 / VOCAB_SIZE)
    assert sorted(pair.draft_follows(VOCAB_SIZE)) == [*range(VOCAB_SIZE)]


def test_figures_of_parts_that_fail_or_hang_say_why_and_the_rest_goes_on(tmp_path: Path) -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield {"ms": 1}
        raise ValueError("no such kernel")

    def hangs() -> Iterator[dict[str, Any]]:
        yield {"ms": 2}
        signal.pause()

    figures = Figures(tmp_path / "figures.jsonl", 60)
    figures.take("a", fails, 9)
    figures.take("b", hangs, 0.05)
    figures.take("c", lambda: [{"ms": 3}], 9)
    figures.take("d", lambda: [{"ms": 4}], 0)
    lines = figures_in(tmp_path / "figures.jsonl")
    told = [(line["part"], line.get("ms", line.get("skipped"))) for line in lines]
    assert told == [
        ("a", 1),
        ("a", "ValueError('no such kernel')"),
        ("b", 2),
        ("b", "not done after 0 s"),
        ("c", 3),
        ("d", "no time is left"),
    ]


@pytest.mark.slow
def test_engine_script_on_a_cpu_measures_every_part(tiny_pair: Path, tmp_path: Path) -> None:
    lines = told(engine_script, tmp_path, "--pair", str(tiny_pair), "--device", "cpu", "--small")
    assert {line["part"] for line in lines} == {*engine_script.PARTS}
    assert [line for line in lines if "skipped" in line and line.get("weights") != "compressed fp8"] == []


@pytest.mark.slow
def test_checks_of_tests_that_fail_tell_each_failure_and_the_counts(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text("def test_good(): pass\n\ndef test_bad(): assert 1 == 2\n")
    given = ["--tests", str(tests), "--processes", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "bench", "on_device", "checks", *given], cwd=ROOT, check=True)
    failed, counts = figures_in(tmp_path / "checks.jsonl")
    assert failed["failed"].endswith("test_bad")
    assert "assert 1 == 2" in failed["report"]
    assert counts["passed"] == counts["failed"] == 1


# On a simulated GPU in float16, since bfloat16 is wrong in Triton's interpreter: without the parts that
# compare with transformers, whose softmax does not take float16 on a CPU.
@needs_compiler
@pytest.mark.slow
def test_engine_script_on_a_gpu_measures_steps_in_graphs(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 2))
    monkeypatch.setattr(device_steps, "PROMPT", range(10, 14))
    monkeypatch.setattr(device_steps, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(device_steps, "CACHE", 2**24)
    monkeypatch.setattr(device_steps, "REPETITIONS", 3)
    monkeypatch.setattr(device_steps, "DTYPE", "float16")
    rank = engine_script.RANK | engine_script.SMALL
    engine_script.write_random(tiny_pair / "rank", rank, "cpu")  # a simulated tensor cannot be saved
    parts = ["steps", "propose", "attention", "decoder", "rank"]
    with any_gpu():
        lines = told(engine_script, tmp_path, "--pair", str(tiny_pair), "--small", "--parts", *parts)
    assert {line["part"] for line in lines} == {*parts}
    assert [line for line in lines if "skipped" in line] == []
    assert {line["path"] for line in lines if "path" in line} == {"graph"}
