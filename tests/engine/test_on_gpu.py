"""The engine says on a GPU what it says on the CPU, by every way that it has there.

Where the machine has none it is simulated: what that shows, and what it cannot, is in
tests/support/simulated_cuda/README.md.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.engine.forward.graphs
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.forward.graphs import CudaCapture
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decoded, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.gpu import gpu
from tests.support.hidden_states import pass_of, transformers_states
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

pytestmark = needs_compiler

HAS_GPU = torch.cuda.is_available()
PROMPT_LENGTHS = (1, 5, 9, 20, 30)
COUNT = 14
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"min_tokens": 8, "logit_bias": {5: 2.0}, "bad_token_ids": (7,)},
)


SIMPLE: dict[str, Any] = {"temperature": 0.7}
EVERY_SAMPLING = pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SIMPLE, id="temperature alone"),
        # Triton's interpreter takes a second for a row that is truncated.
        pytest.param({}, id="every setting", marks=pytest.mark.slow),
    ],
)


@dataclass(frozen=True)
class Way:
    """How a step goes on the GPU."""

    settings: dict[str, Any]
    launched: str  # part of the name of a kernel that tells this way
    path: str  # path of its last step
    slow_because: str = ""  # part of the only reason
    has_triton: bool = True


SDPA = "scaled_dot_product_attention"
WAYS = {
    "gathered": Way({}, SDPA, "gathered", "Triton is missing", has_triton=False),
    "batch-invariant": Way({"batch_invariant": True}, "graph.replay", "graph"),
    "kernels": Way({"graphs": False}, "attend_tile", "kernels", "graphs are off"),
    "graphs": Way({}, "graph.replay", "graph"),
}
# What graphs compute the kernels do, and forward/test_batch_invariant.py has its own look at a GPU.
REPEATED = ("batch-invariant", "kernels")


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 5, 30))


@pytest.fixture(
    params=[
        pytest.param(way, id=name, marks=pytest.mark.slow if name in REPEATED else ())
        for name, way in WAYS.items()
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    found: Way = request.param
    if not found.has_triton:
        monkeypatch.setitem(sys.modules, "outrider.engine.kernels.paged_attention", None)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def engine_of(folder: Path, **settings: Any) -> Engine:
    given = {"block_size": 8, "cache_memory": 2**21, "prefill_chunk": 16, "self_check": False, **settings}
    return Engine.from_settings(EngineSettings(model=str(folder), **given))


def requests(**sampling: Any) -> list[OfflineRequest]:
    """Requests of all lengths, with all sampling settings or with those given."""
    rng = random.Random(1)
    return [
        OfflineRequest(
            tuple(rng.choices(range(3, VOCAB_SIZE), k=length)),
            Sampling(max_tokens=COUNT, ignore_eos=True, **(sampling or SAMPLINGS[number])),
            number,
        )
        for number, length in enumerate(PROMPT_LENGTHS)
    ]


def texts_of(outputs: Sequence[Output]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]


@cache
def on_the_cpu(folder: Path, **sampling: Any) -> list[tuple[int, ...]]:
    engine = engine_of(folder, dtype="float32", device="cpu")
    return texts_of(generate(engine, None, requests(**sampling), 0))


def launched(cuda: SimulatedCuda | None, name: str) -> bool:
    """Counts of launches; a real GPU tells only the path of a step."""
    return cuda is None or any(name in cause for cause in cuda.counts.launches)


@pytest.mark.slow_beyond_first
@EVERY_SAMPLING
def test_text_is_the_cpu_s(folder: Path, way: Way, sampling: dict[str, Any]) -> None:
    with gpu() as cuda:
        engine = engine_of(folder, device="cuda", dtype="float32", **way.settings)
        texts = texts_of(generate(engine, None, requests(**sampling), 0))
    assert launched(cuda, way.launched)
    assert texts == on_the_cpu(folder, **sampling)
    assert engine.last_step is not None
    assert engine.last_step.path == way.path
    reasons = engine.runner.slow_because
    assert [way.slow_because in reason for reason in reasons] == [True] * bool(way.slow_because)


@pytest.mark.slow_beyond_first
def test_drafter_gets_the_states_that_the_cpu_computes(folder: Path, way: Way) -> None:
    layers = (-1, 0, 1)
    with gpu() as cuda:
        states = pass_of(folder, layers, device="cuda", dtype="float32", **way.settings).states
    assert launched(cuda, way.launched)
    expected = transformers_states(folder)
    for place, layer in enumerate(layers):
        torch.testing.assert_close(states[:, place], expected[layer], rtol=1e-3, atol=1e-4)


@dataclass
class Guesses(Drafter):
    """Knows the texts; every token follows wrong siblings, and every fifth is missing.

    So what is kept of a tree has to move in the cache, and the rest to be rolled back.
    """

    texts: dict[tuple[int, ...], tuple[int, ...]]
    siblings: int

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        length = request.sequence.prompt_length
        done = len(request.sequence.tokens) - length
        text = self.texts[tuple(request.sequence.tokens[:length])]
        draft, parent = Draft(), ROOT
        for place in range(done, min(done + request.depth, len(text))):
            right = text[place]
            guessed = [(right + n) % VOCAB_SIZE for n in range(1, 1 + self.siblings)]
            if place % 5 < 4:
                guessed.append(right)
            elif not guessed:
                guessed = [right ^ 1]
            draft = Draft((*draft.tokens, *guessed), (*draft.parents, *[parent] * len(guessed)))
            parent = len(draft) - 1
        return draft

    def forget(self, sequence: DraftedSequence) -> None:
        pass


@pytest.mark.slow_beyond_first
@EVERY_SAMPLING
@pytest.mark.parametrize(
    "siblings", [pytest.param(0, id="chains", marks=pytest.mark.slow), pytest.param(1, id="trees")]
)
def test_drafts_change_nothing(folder: Path, way: Way, siblings: int, sampling: dict[str, Any]) -> None:
    """Drafts are verified, kept in part, moved and rolled back."""
    plain, asked = on_the_cpu(folder, **sampling), requests(**sampling)
    known = {request.prompt: text for request, text in zip(asked, plain, strict=True)}
    with gpu():
        target = engine_of(folder, device="cuda", dtype="float32", **way.settings)
        outputs = generate(target, Guesses(known, siblings), asked, 4)
    assert sum(output.accepted for output in outputs) > COUNT * len(outputs) // 3
    assert sum(output.drafted - output.accepted for output in outputs) >= len(outputs)
    assert texts_of(outputs) == plain


@pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter is wrong in bfloat16: needs a GPU")
@pytest.mark.parametrize("siblings", [0, 1])
def test_batch_invariant_numerics_keep_a_text_in_bfloat16(folder: Path, siblings: int) -> None:
    """Alone and plain, or in company and with Drafts: not a bit of its logits differs."""
    engine = engine_of(folder, device="cuda", dtype="bfloat16", batch_invariant=True)
    asked = requests(temperature=1.0)
    alone = [generate(engine, None, [request], 0)[0].tokens for request in asked]
    known = {request.prompt: text for request, text in zip(asked, alone, strict=True)}
    assert texts_of(generate(engine, None, asked, 0)) == alone
    assert texts_of(generate(engine, Guesses(known, siblings), asked, 4)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_draft_model_drafts_alike_on_gpu_and_cpu(folder: Path, verification: str) -> None:
    """Verifies by every rule; ahead of the verdicts too, if the rule allows it."""
    asked = requests(temperature=0.8, top_p=0.95, verification=verification)
    alternatives = 2 if verification == "coupled" else 0

    def answered(device: str) -> list[Output]:
        target = engine_of(folder, device=device, dtype="float32")
        # In half precision some guesses differ, as a GPU rounds otherwise; rejection sampling judges these.
        draft = engine_of(folder, device=device, dtype="float32", draft_ahead=6)
        return generate(target, DraftModel(draft), asked, 3, alternatives)

    expected = answered("cpu")
    with gpu():
        outputs = answered("cuda")
    assert texts_of(outputs) == texts_of(expected)
    assert sum(output.accepted for output in outputs) > COUNT


@pytest.mark.slow
def test_short_cache_changes_nothing(folder: Path) -> None:
    block = 8 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, kv heads, dimension, float32
    with gpu():
        engine = engine_of(folder, device="cuda", dtype="float32", cache_memory=12 * block)
        asked = requests(**SIMPLE)
        opened = [engine.open(len(request.prompt), request.noise_key, request.sampling) for request in asked]
        for sequence, request in zip(opened, asked, strict=True):
            engine.submit(plain_decoding(sequence.number, 0, request.prompt, COUNT))
        preemptions = 0
        while engine.has_work:
            for result in engine.step():
                assert isinstance(result, Decoded)
                preemptions += result.timings.preemptions
                if result.finish is not None:
                    engine.close(opened[result.sequence])
    assert preemptions > 0
    texts = [tuple(sequence.tokens[sequence.prompt_length :]) for sequence in opened]
    assert texts == on_the_cpu(folder, **SIMPLE)


class Company:
    """Sequences that end at different times, come, go, are set back and go on while the first one decodes."""

    def __init__(self, engine: Engine, stop_token: int) -> None:
        self._engine = engine
        self._stop_token = stop_token
        self._prompts = [request.prompt for request in requests(**SIMPLE)]
        self._said: dict[int, list[int]] = {}  # tokens by number of the sequence

    def texts(self) -> list[list[int]]:
        """Text of each sequence; of the closed sequence only what it says for sure."""
        engine = self._engine
        first = self._start(1, 16)
        self._start(2, 4, max_tokens=4)
        self._start(2, COUNT, stop_token_ids=(self._stop_token,))
        goes_on = self._start(1, 3)
        closed = self._start(0, COUNT)
        set_back = self._start(3, COUNT)
        length = len(self._prompts[3])
        kept = 0

        def change() -> None:
            nonlocal kept
            kept = len(self._said[set_back])
            engine.submit(plain_decoding(set_back, length + 2, (9,), 6, round=1))

        changes: dict[int, Callable[[], object]] = {  # changes by tokens of the first sequence
            3: lambda: self._start(4, COUNT),
            5: lambda: engine.close(engine.sequence(closed)),
            6: change,
            8: lambda: engine.submit(
                plain_decoding(goes_on, len(self._prompts[1]), tuple(self._said[goes_on]), 8)
            ),
        }
        while engine.has_work:
            for result in engine.step():
                assert isinstance(result, Decoded)
                self._said[result.sequence].append(result.verdict.tokens[-1])
            changes.pop(len(self._said[first]), lambda: None)()
        assert not changes
        del self._said[set_back][:kept], self._said[closed][4:]
        return [*self._said.values()]

    def _start(self, place: int, count: int, **sampling: Any) -> int:
        prompt, number = self._prompts[place], len(self._said)
        settings = Sampling(**{"max_tokens": 16, "ignore_eos": True, **SIMPLE, **sampling})
        self._said[number] = []
        sequence = self._engine.open(len(prompt), number, settings)
        self._engine.submit(plain_decoding(sequence.number, 0, prompt, count))
        return sequence.number


@pytest.mark.slow
def test_company_that_comes_and_goes_changes_no_text(folder: Path, way: Way) -> None:
    """Steps that are launched before the tokens of those before are known have rows in vain."""
    stop_token = on_the_cpu(folder, **SIMPLE)[2][4]
    expected = Company(engine_of(folder, dtype="float32", device="cpu"), stop_token).texts()
    with gpu() as cuda:
        engine = engine_of(folder, device="cuda", dtype="float32", **way.settings)
        assert Company(engine, stop_token).texts() == expected
    assert cuda is None or (cuda.counts.busy_waits.total() >= 8) == (way.path != "gathered")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none: then they are simulated")
def test_self_check_passes_and_a_second_gpu_will_do(folder: Path) -> None:
    with gpu():
        engine = engine_of(folder, device="cuda:1", dtype="float32", self_check=True)
        assert engine.settings.device == "cuda:1"
        assert torch.cuda.current_device() == 1
        assert texts_of(generate(engine, None, requests(**SIMPLE), 0)) == on_the_cpu(folder, **SIMPLE)


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="only the simulated GPU tells what was compiled")
def test_no_kernel_is_compiled_once_the_engine_is_loaded(folder: Path) -> None:
    """A request would wait for seconds."""
    texts = on_the_cpu(folder, **SIMPLE)
    with simulated_cuda() as cuda:
        target = engine_of(folder, device="cuda", dtype="float32", graphs=False)
        loaded = set(cuda.compiled)
        truncated, with_penalties = requests()[1:3]
        for request in truncated, with_penalties:
            sampling = request.sampling.model_copy(update={"max_tokens": 2})
            generate(target, None, [replace(request, sampling=sampling)], 0)
        asked = requests(**SIMPLE)
        guesses = Guesses({request.prompt: text for request, text in zip(asked, texts, strict=True)}, 1)
        generate(target, guesses, asked, 3)
    choice, attention = {"_scan", "_collect", "_choose", "find_path"}, {"attend_tile", "join_parts"}
    layer, tables = {"_norm", "_rotate_and_store", "_gate"}, {"take_in_blocks"}
    assert {name for name, _ in loaded} == choice | attention | layer | tables
    assert not cuda.compiled - loaded


def test_failed_capture_leaves_the_stream_as_it_was() -> None:
    with gpu():
        numbers = torch.zeros(3, device="cuda")
        before = torch.cuda.current_stream()

        def waits() -> None:
            numbers.sum().item()

        with pytest.raises(RuntimeError, match="captur"):
            CudaCapture()(waits)
        assert torch.cuda.current_stream() == before
