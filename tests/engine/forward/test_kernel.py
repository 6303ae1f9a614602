"""Attention by kernels and captured passes say what the ordinary way says.

Neither runs without CUDA: here plain arithmetic stands in for the kernels, and a capture runs its pass again.
What is tested is all that surrounds them. The kernels are in tests/engine/kernels, and all of it together in
tests/engine/test_on_gpu.py.
"""

import logging
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import outrider.engine.forward.graphs
import outrider.engine.loop.forward_pass
import outrider.engine.loop.load
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.forward.batch import paged_batch
from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.forward.kernel import find_kernel
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.kernels.cpu.attention import CpuAttention
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.capture import Capture, capturing
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions

PROMPT_LENGTHS = (1, 5, 9, 30, 61)


def requests() -> list[OfflineRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [tuple(torch.randint(256, (n,), generator=generator).tolist()) for n in PROMPT_LENGTHS]
    sampling = Sampling(temperature=0.7, max_tokens=24)
    return [OfflineRequest(prompt, sampling, key) for key, prompt in enumerate(prompts)]


class Guesses:
    """A drafter that knows the text, and errs at every fifth position."""

    def __init__(self, texts: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self.texts = texts

    def propose(self, requests):
        drafts = []
        for request in requests:
            prompt = tuple(request.sequence.tokens[: request.sequence.prompt_length])
            done = len(request.sequence.tokens) - len(prompt)
            ahead = self.texts[prompt][done : done + request.depth]
            drafts.append(
                Draft.chain([t ^ 1 if (done + i) % 5 == 4 else t for i, t in enumerate(ahead)][:-1])
            )
        return drafts

    def forget(self, sequence):
        pass


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2", "gpt_oss"])
def checkpoint(request, tmp_path_factory):
    """Checkpoints with nothing special, with sliding windows, soft-capped, with sinks."""
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def capture(monkeypatch) -> Capture:
    return capturing(monkeypatch)


def settings_of(folder, **settings) -> EngineSettings:
    return EngineSettings(model=str(folder), block_size=8, cache_memory=2**22, prefill_chunk=16, **settings)


def engine_of(folder, **settings) -> Engine:
    return Engine.from_settings(settings_of(folder, **settings))


def texts_of(engine: Engine) -> list[tuple[int, ...]]:
    return [output.tokens for output in generate(engine, None, requests(), 0)]


@pytest.fixture(scope="module")
def expected(checkpoint):
    return texts_of(engine_of(checkpoint))


@pytest.mark.slow_beyond_first
def test_kernels_and_graphs_say_the_same(checkpoint, expected, capture):
    engine = engine_of(checkpoint)
    assert capture.captured == 4
    assert texts_of(engine) == expected
    texts = {request.prompt: tokens for request, tokens in zip(requests(), expected, strict=True)}
    outputs = generate(engine, Guesses(texts), requests(), 4)
    assert [output.tokens for output in outputs] == expected
    assert sum(output.accepted for output in outputs) > 40
    assert capture.replayed > 30


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(("least", "ways"), [(64, {"graph"}), (65, {"graph", "kernels"})])
def test_steps_with_a_chunk_of_a_prompt_are_replays_from_the_least_size_on(
    checkpoint, expected, capture, monkeypatch, least, ways
):
    """The next tokens of other sequences go with the chunk. Below the least size each kernel is launched."""
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 64))
    monkeypatch.setattr(outrider.engine.forward.graphs, "LEAST_CHUNK", least)
    settings = settings_of(checkpoint).model_copy(update={"prefill_chunk": 50})
    engine, paths = Engine.from_settings(settings), set()
    step = engine.step

    def noted(*given):
        results = step(*given)
        paths.add(engine.last_step.path)
        return results

    monkeypatch.setattr(engine, "step", noted)
    assert texts_of(engine) == expected
    assert paths == ways


def test_chunk_graph_without_room_for_the_logits_of_a_step_is_not_taken(checkpoint, capture, monkeypatch):
    """A scored prompt wants logits of all its tokens."""
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 64))
    monkeypatch.setattr(outrider.engine.forward.graphs, "MOST_CHUNK_LOGITS", 8)
    forward = load_forward_pass(settings_of(checkpoint, self_check=False))
    blocks = HeldBlocks(range(8))
    for num_logits, path in ((8, "graph"), (9, "kernels")):
        step = StepInput.of(forward.tables, [Feed([1] * (FEW_QUERIES + 1), num_logits, 0, blocks, None)])
        assert forward.prepare(step).path == path


def test_captured_sizes_at_most_a_fifth_is_padding():
    sizes = outrider.engine.forward.graphs.CAPTURED_SIZES
    assert sizes[-1] >= 2048
    for smaller, larger in pairwise(sizes):
        assert larger < 64 or (larger - smaller - 1) / larger <= 0.2


def test_batch_invariant_passes_are_replays_of_one_graph(tmp_path, capture):
    folder = write_checkpoint(tmp_path, "gemma2")
    expected = texts_of(engine_of(folder, graphs=False))
    assert not capture.captured
    engine = engine_of(folder, batch_invariant=True)
    assert capture.captured == 1
    assert texts_of(engine) == expected
    assert capture.replayed > sum(PROMPT_LENGTHS) // PASS_TOKENS["cpu"] + 24
    assert engine.runner.slow_because == ()


def test_graphs_can_be_switched_off(checkpoint, expected, capture):
    engine = engine_of(checkpoint, graphs=False)
    assert texts_of(engine) == expected
    assert capture.captured == 0
    assert engine.runner.slow_because == ("no step has a CUDA graph: graphs are off in the settings",)


def test_size_that_one_rank_cannot_capture_no_rank_replays(checkpoint, capture):
    """Or they would wait for each other in different places."""
    asked = []

    def least(number: int) -> int:
        asked.append(number)
        return 0 if len(asked) == 3 else number  # after the number of blocks, 32 rows and 8

    group = SimpleNamespace(rank=0, least=least, agree=lambda flags: None)
    forward = load_forward_pass(settings_of(checkpoint, self_check=False), group)
    (reason,) = forward.slow_because
    assert "no CUDA graph of 8 tokens" in reason
    assert "another rank cannot" in reason
    feeds = [Feed([1, 2], 1, 8 * place, HeldBlocks([place, place + 4]), None) for place in range(4)]
    step = StepInput.of(forward.tables, feeds)
    assert forward.prepare(step).paged.token_ids.shape[1] == 32
    assert asked[1:] == [True] * 4


def test_memory_that_a_graph_reads_lives_as_long_as_the_graph(checkpoint, capture, monkeypatch):
    """Memory that is freed after a capture is another's when the graph is replayed."""
    seen = []

    def noted(*given):
        seen.append(given)
        return paged_batch(*given)

    monkeypatch.setattr(outrider.engine.forward.graphs, "paged_batch", noted)
    engine = engine_of(checkpoint)
    (graphs,) = engine.runner._forward._graphs._graphs[0][:1]
    kept = graphs._memory.buffer, graphs._tables.on_device
    held = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for given, logit_rows, *_ in seen:
        read = [*vars(given).values(), logit_rows]
        assert {tensor.untyped_storage().data_ptr() for tensor in read} <= held


def of_passes(caplog) -> list[logging.LogRecord]:
    """What is said of passes: of linear layers a processor may give reason to speak."""
    return [record for record in caplog.records if record.name == outrider.engine.loop.load.__name__]


def test_graph_that_cannot_be_captured_is_gone_without(checkpoint, expected, capture, monkeypatch, caplog):
    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(outrider.engine.loop.forward_pass, "CudaCapture", lambda: refuse)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(checkpoint)
    (reason,) = engine.runner.slow_because
    assert "no CUDA graph of 1, 4, 8, 32 tokens" in reason
    assert "operation not permitted" in reason
    assert [(record.levelname, reason in record.getMessage()) for record in of_passes(caplog)] == [
        ("ERROR", True)
    ]
    assert texts_of(engine) == expected


def test_size_that_is_captured_is_not_complained_of(checkpoint, capture, monkeypatch):
    def refuse_the_first(work):
        capture.captured += 1
        if capture.captured == 1:
            raise RuntimeError("out of memory")
        work()
        return work

    monkeypatch.setattr(outrider.engine.loop.forward_pass, "CudaCapture", lambda: refuse_the_first)
    (reason,) = engine_of(checkpoint).runner.slow_because
    assert "no CUDA graph of 32 tokens" in reason


def test_where_nothing_is_missing_there_is_nothing_to_say(checkpoint, capture, caplog):
    assert engine_of(checkpoint).runner.slow_because == ()
    assert not of_passes(caplog)


NARROW, WIDE, WIDE_LATENTS = {0: (2, 16, 16)}, {0: (1, 576, 512)}, {0: (1, 640, 0)}


LIMITS = {"block_size": 8, "context_length": 512}


@needs_functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_of_a_cpu_takes_two_types(dtype):
    assert isinstance(find_kernel(NARROW, dtype, torch.device("cpu"), **LIMITS), CpuAttention)


@pytest.mark.parametrize(
    ("device", "dtype", "shapes", "why"),
    [
        ("cuda", torch.bfloat16, WIDE, "heads have 576 dimensions, a kernel on a GPU takes 256 at most"),
        ("cuda", torch.bfloat16, WIDE_LATENTS, "latents have 640 dimensions, a kernel on a GPU takes 576"),
        ("cuda", torch.bfloat16, NARROW, "pip install triton"),
        ("cpu", torch.float16, NARROW, "dtype='float16' has no kernel on a CPU"),
        ("cpu", torch.float32, {0: (2, 24, 24)}, "heads have 24 dimensions"),
    ],
)
def test_missing_kernel_is_explained(monkeypatch, device, dtype, shapes, why):
    monkeypatch.setitem(sys.modules, "outrider.engine.kernels.paged_attention", None)  # as without Triton
    assert why in find_kernel(shapes, dtype, torch.device(device), **LIMITS)


@pytest.mark.parametrize(("batch_invariant", "takes_kernel"), [(False, False), (True, True)])
@needs_functions
def test_bfloat16_on_a_cpu_takes_the_kernel_for_batch_invariant_numerics_alone(
    tmp_path, batch_invariant, takes_kernel
):
    """Else gathered blocks are faster, if a sequence feeds several tokens."""
    folder = write_checkpoint(tmp_path, "llama")
    settings = settings_of(folder, dtype="bfloat16", self_check=False, batch_invariant=batch_invariant)
    assert (load_forward_pass(settings).kernel is not None) == takes_kernel
