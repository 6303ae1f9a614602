"""Batch-invariant numerics give a context the same row of logits, bit for bit, whatever shares the step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import outrider.engine.forward.kernel
import outrider.engine.loop.runner
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.choosing.sampler import Choosing, begin_choosing
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.batch_invariant import PASS_TOKENS, check_rows_are_apart
from outrider.engine.inputs.choice_input import PackedRows
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions
from tests.support.gpu import gpu
from tests.support.model import before_passes
from tests.support.simulated_cuda.install import needs_compiler

COUNT = 12
Context = tuple[tuple[int, ...], ...]


class Recorder:
    """Listens where tokens are chosen: the logits after each context, and contexts that had several."""

    def __init__(self) -> None:
        self.logits: dict[Context, torch.Tensor] = {}
        self.compared = 0
        self.differing: list[Context] = []

    def __call__(
        self,
        logits: torch.Tensor,
        rows: ChoosingRows,
        are_finite: torch.Tensor,
        ranks: int = 1,
        drafts: Sequence[Draft] | None = None,
        packed: PackedRows | None = None,
        experts_read: torch.Tensor | None = None,
    ) -> Choosing:
        for row, own in zip(rows.every, logits, strict=True):
            context = tuple(row.prompt), (*row.generated, *row.path)
            if context in self.logits:
                self.compared += 1
                if not torch.equal(self.logits[context], own):
                    self.differing.append(context)
            else:
                self.logits[context] = own.clone()
        return begin_choosing(logits, rows, are_finite, ranks, drafts, packed)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(outrider.engine.loop.runner, "begin_choosing", recorder)
    return recorder


def encoded(count: int) -> list[tuple[int, ...]]:
    """Prompts over all kinds of text, so of many lengths."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    texts = [prompts(KINDS[number % len(KINDS)], 40)[number // len(KINDS) % 40] for number in range(count)]
    return [tuple(tokenizer.encode(text).ids) for text in texts]


@cache
def demo(role: str, **settings: object) -> Engine:
    fields = {"model": str(DEMO / role), "dtype": "bfloat16", "threads": 1, "cache_memory": 2**27, **settings}
    return Engine.from_settings(EngineSettings.model_validate(fields))


def plain(target: Engine, asked: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy text after each prompt, all at once."""
    sampling = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
    sequences = [target.open(len(prompt), 0, sampling) for prompt in asked]
    for sequence, prompt in zip(sequences, asked, strict=True):
        target.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    while target.has_work:
        assert all(isinstance(result, Decoded) for result in target.step())
    texts = [sequence.tokens[len(prompt) :] for sequence, prompt in zip(sequences, asked, strict=True)]
    for sequence in sequences:
        target.close(sequence)
    return texts


def verified(target: Engine, prompt: tuple[int, ...], drafts: list[Draft]) -> None:
    """One Draft after the other, each following all that was accepted before."""
    sequence = target.open(len(prompt), 0, Sampling(temperature=0, max_tokens=64, ignore_eos=True))
    tokens, base = prompt, 0
    for round, draft in enumerate(drafts):
        target.submit(Decode(sequence.number, base, tokens, draft, round))
        (result,) = [result for result in run(target) if isinstance(result, Decoded)]
        base, tokens = base + len(tokens), result.verdict.tokens
    target.close(sequence)


def run(target: Engine) -> list[object]:
    results: list[object] = []
    while target.has_work:
        results += target.step()
    return results


def off_the_chain(tokens: list[int]) -> Draft:
    """The text behind wrong guesses: each of its tokens comes after a sibling that is not it."""
    nodes, parents, last = [], [], ROOT
    for token in tokens:
        nodes += [(token + 1) % 100, token]
        parents += [last, last]
        last = len(nodes) - 1
    return Draft(tuple(nodes), tuple(parents))


@dataclass(frozen=True)
class Extent:
    """How much is compared."""

    watched: int  # prompts whose text is verified
    depths: Sequence[int]  # depths of the Drafts that are verified


MADE_UP = [tuple((7 * index + 3 * start) % 256 for index in range(20 + start)) for start in range(8)]
FEW, MANY = Extent(2, (1, 6)), Extent(4, range(1, 9))


def every_way(
    target: Engine, other_chunks: Sequence[Engine], asked: list[tuple[int, ...]], extent: Extent
) -> None:
    """The same text alone, in company, under Drafts of any depth and shape, from other prompt chunks."""
    count = extent.watched
    texts = [plain(target, [prompt])[0] for prompt in asked[:count]]
    assert plain(target, asked)[:count] == texts
    for prompt, text in zip(asked[:count], texts, strict=True):
        for depth in extent.depths:
            verified(target, prompt, [Draft(), Draft.chain(text[1 : depth + 1])])
        verified(target, prompt, [Draft(), off_the_chain(text[1:7]), Draft.chain(text[8:10])])
    for other in other_chunks:
        assert plain(other, asked)[:count] == texts


@needs_functions
@pytest.mark.parametrize(
    ("count", "chunks", "extent", "least"),
    [(8, (7,), FEW, 150), pytest.param(32, (7, 33), MANY, 1000, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_context_has_one_row_of_logits_in_bfloat16(
    recorder: Recorder, count: int, chunks: tuple[int, ...], extent: Extent, least: int
) -> None:
    others = [demo("target", batch_invariant=True, prefill_chunk=chunk) for chunk in chunks]
    every_way(demo("target", batch_invariant=True), others, encoded(count), extent)
    assert recorder.compared > least
    assert not recorder.differing


@needs_functions
def test_passes_of_any_work_have_a_single_shape() -> None:
    """Small products would be the same by luck if their shapes differed."""
    target = demo("target", batch_invariant=True)
    passes = set()
    before_passes(target, lambda batch: passes.add((batch.token_ids.shape, len(batch.logit_rows))))
    every_way(target, [], encoded(4), FEW)
    assert passes
    rows = PASS_TOKENS["cpu"]
    assert passes <= {((1, rows), rows), ((1, rows), 0)}  # with logits and without


@needs_functions
@pytest.mark.parametrize(
    ("kind", "extent"),
    [
        ("gemma2", FEW),
        *(
            pytest.param(kind, MANY, marks=pytest.mark.slow)
            for kind in ("mistral", "gemma2", "phi3", "gpt_neox")
        ),
    ],
)
def test_with_windows_capped_scores_and_few_slots_a_block_too(
    kind: str, extent: Extent, recorder: Recorder, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, kind)
    settings = {"model": str(folder), "dtype": "bfloat16", "cache_memory": 2**22, "batch_invariant": True}
    engines = [
        Engine.from_settings(EngineSettings.model_validate({**settings, **sizes}))
        for sizes in ({"block_size": 16}, {"block_size": 3, "prefill_chunk": 5})
    ]
    every_way(engines[0], engines[1:], MADE_UP, extent)
    assert recorder.compared > (100 if extent is FEW else 200)
    assert not recorder.differing


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("kind", "count", "extent", "layers"),
    [
        ("llama", 2, Extent(1, (3,)), 1),
        pytest.param("glm4_moe", 2, Extent(1, (3,)), 2, marks=pytest.mark.slow),
        pytest.param("llama", 2, Extent(1, (3,)), 2, marks=pytest.mark.slow),
        *(pytest.param(kind, 8, FEW, 2, marks=pytest.mark.slow) for kind in ("llama", "mistral", "gemma2")),
    ],
)
def test_on_a_gpu_too(
    kind: str, count: int, extent: Extent, layers: int, recorder: Recorder, tmp_path: Path
) -> None:
    """Passes run by the paged kernels, and by one graph."""
    folder = write_checkpoint(tmp_path, kind, num_hidden_layers=layers)
    fields = {"model": str(folder), "dtype": "float16", "cache_memory": 2**21, "self_check": False}
    with gpu() as cuda:
        target = Engine.from_settings(
            EngineSettings.model_validate({**fields, "device": "cuda", "batch_invariant": True})
        )
        target.runner.launches_early = False  # so that each row says which context it is of
        every_way(target, [], MADE_UP[:count], extent)
    assert target.runner.slow_because == ()
    if cuda is not None:
        assert any("graph.replay" in cause for cause in cuda.counts.launches)
        assert not any("scaled_dot_product" in cause for cause in cuda.counts.launches)
    assert recorder.compared > (20 if count == 2 else 50)
    assert not recorder.differing


@needs_functions
def test_quantized_target_too(recorder: Recorder, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    fields = {"model": str(folder), "dtype": "bfloat16", "cache_memory": 2**22, "threads": 1}
    target = Engine.from_settings(
        EngineSettings.model_validate({**fields, "quantization": "int8", "batch_invariant": True})
    )
    every_way(target, [], MADE_UP, FEW)
    assert recorder.compared > 50


@needs_functions
@pytest.mark.slow
def test_quantized_target_of_the_demo_too(recorder: Recorder) -> None:
    every_way(demo("target", batch_invariant=True, quantization="int8"), [], encoded(8), MANY)
    assert recorder.compared > 200
    assert not recorder.differing


@needs_functions
def test_batch_invariant_passes_compute_what_usual_steps_compute() -> None:
    asked = encoded(12)
    usual, apart = (demo("target", dtype="float32", batch_invariant=value) for value in (False, True))
    assert plain(apart, asked) == plain(usual, asked)


def seeded(count: int, tokens: int) -> list[OfflineRequest]:
    samplings = [Sampling(temperature=(0.0, 0.7, 1.0)[seed % 3], max_tokens=tokens) for seed in range(count)]
    return [
        OfflineRequest(prompt, sampling, seed)
        for seed, (prompt, sampling) in enumerate(zip(encoded(count), samplings, strict=True))
    ]


def differing(count: int, tokens: int) -> dict[str, int]:
    """Per way, how many seeded texts in bfloat16 are not those of plain decoding one at a time."""
    target, asked = demo("target", batch_invariant=True), seeded(count, tokens)

    def texts(drafter: Drafter | None, at_once: int, alternatives: int = 0) -> list[Output]:
        return [
            output
            for start in range(0, count, at_once)
            for output in generate(target, drafter, asked[start : start + at_once], 4, alternatives)
        ]

    reference = texts(None, 1)
    ways = {
        "plain, batch 32": texts(None, 32),
        "drafts, alone": texts(DraftModel(demo("draft")), 1),
        "drafts, batch 32": texts(DraftModel(demo("draft")), 32),
        "trees, batch 32": texts(DraftModel(demo("draft")), 32, alternatives=3),
    }
    return {
        way: sum(a.tokens != b.tokens for a, b in zip(reference, outputs, strict=True))
        for way, outputs in ways.items()
    }


@needs_functions
def test_seeded_text_is_the_same_in_bfloat16() -> None:
    assert not any(differing(16, 16).values())


@needs_functions
@pytest.mark.slow
def test_500_seeded_texts_are_the_same_in_bfloat16() -> None:
    counts = differing(500, 32)
    print(counts)
    assert not any(counts.values())


@pytest.mark.parametrize(
    ("dtype", "heads", "missing", "why"),
    [
        ("float16", 4, None, "dtype='float16' has no kernel on a CPU, which takes 'float32' and 'bfloat16'"),
        ("bfloat16", 8, None, "heads have 8 dimensions, a kernel on a CPU takes multiples of 16"),
        ("float32", 4, "no C++ compiler", "no C++ compiler"),
    ],
)
def test_batch_invariant_target_without_a_kernel_is_refused(
    dtype: str, heads: int, missing: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_attention_heads=heads)
    if missing is not None:
        monkeypatch.setattr(outrider.engine.forward.kernel, "found", lambda: missing)
    fields = {"model": str(folder), "dtype": dtype, "cache_memory": 2**22, "batch_invariant": True}
    fields["device"] = "cpu"
    with pytest.raises(UnsupportedModelError, match=f"batch_invariant=True.*{tmp_path}.*{re.escape(why)}"):
        Engine.from_settings(EngineSettings.model_validate(fields))


@needs_functions
@pytest.mark.parametrize(
    "kind", ["glm4_moe", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe", "gpt_oss"))]
)
def test_mixture_of_experts_too(kind: str, recorder: Recorder, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind)
    fields = {"dtype": "bfloat16", "cache_memory": 2**22, "threads": 1, "batch_invariant": True}
    target, other = (
        Engine.from_settings(EngineSettings.model_validate({"model": str(folder), **fields, **more}))
        for more in ({}, {"prefill_chunk": 5})
    )
    every_way(target, [other], MADE_UP, FEW)
    assert recorder.compared > 100
    assert not recorder.differing


def test_mixture_of_experts_without_a_description_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "afmoe")
    with pytest.raises(UnsupportedModelError, match=f"batch_invariant=True.*{tmp_path}.*expert"):
        Engine.from_settings(EngineSettings(model=str(folder), cache_memory=2**22, batch_invariant=True))


def test_convolution_is_not_taken_for_experts() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4))
    check_rows_are_apart(model, "a vision tower")


@pytest.mark.parametrize("kind", ["JetMoeParallelExperts", "Linear"])
def test_experts_are_found_by_their_names(kind: str) -> None:
    experts = type(kind, (torch.nn.Module,), {})()
    model = torch.nn.ModuleDict({"experts" if kind == "Linear" else "input": experts})
    with pytest.raises(UnsupportedModelError, match="expert"):
        check_rows_are_apart(model, "a mixture")
