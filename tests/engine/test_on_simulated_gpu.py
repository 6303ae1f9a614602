"""On a GPU the engine says what it says on the CPU, by every way that it has there.

The GPU is simulated: what it shows, and what it cannot, is in tests/support/simulated_cuda/README.md.
"""

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.asked import Asked, Text
from outrider.engine.drafters.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.speculate import Output, Request, generate
from outrider.engine.work import Generate, Generated
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.simulated_cuda.kernels import FA2, FA3, FlashBackend

pytestmark = needs_compiler

PROMPT_LENGTHS = (1, 5, 9, 30, 45)
COUNT = 14
NEAR_TIE = 0.1  # of two logits in bfloat16; those of unrelated tokens are ten times as far apart
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 20, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"min_tokens": 8, "logit_bias": {5: 2.0}, "bad_token_ids": (7,)},
)


@dataclass(frozen=True)
class Way:
    """How a step goes on the GPU."""

    settings: dict[str, Any]
    flash: FlashBackend = FA2
    launched: str = "scaled_dot_product_attention"  # part of the name of a kernel that tells this way

    @property
    def is_exact(self) -> bool:
        """Whether numbers are so close to the CPU's that no choice differs."""
        return self.settings["dtype"] == "float32"


WAYS = {
    "gathered": Way({"dtype": "float32"}),
    "batch-invariant": Way({"dtype": "float32", "batch_invariant": True}),
    "the paged kernel of FA3": Way({"dtype": "bfloat16", "graphs": False}, FA3, "flash_attention"),
    "graphs over FA3": Way({"dtype": "bfloat16"}, FA3, "graph.replay"),
    "the paged kernel of FA2": Way(
        {"dtype": "bfloat16", "graphs": False, "block_size": 256}, FA2, "flash_attention"
    ),
}
FAILING = {"the paged kernel of FA2": "its C++ wants cu_seq_k where cu_seq_q is given"}
EXACT = [name for name, way in WAYS.items() if way.is_exact]


def ways(names: Items[str], failing: dict[str, str]) -> list[Any]:
    marks = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in failing.items()}
    return [pytest.param(WAYS[name], id=name, marks=marks.get(name, ())) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def engine_of(folder: Path, **settings: Any) -> Engine:
    given = {"block_size": 8, "cache_memory": 2**21, "prefill_chunk": 16, "self_check": False, **settings}
    return Engine.from_settings(EngineSettings(model=str(folder), **given))


def requests(*, greedy: bool = False, **sampling: Any) -> list[Request]:
    """Of all lengths, with all sampling settings or with those given."""
    rng = random.Random(1)
    return [
        Request(
            tuple(rng.choices(range(3, VOCAB_SIZE), k=length)),
            Sampling(max_tokens=COUNT, ignore_eos=True, **(sampling or SAMPLINGS[0 if greedy else number])),
            number,
        )
        for number, length in enumerate(PROMPT_LENGTHS)
    ]


def texts_of(outputs: Items[Output]) -> list[tuple[int, ...]]:
    return [output.tokens for output in outputs]


@cache
def on_the_cpu(folder: Path) -> list[tuple[int, ...]]:
    return texts_of(generate(engine_of(folder, dtype="float32", device="cpu"), None, requests(), 0))


def launched(cuda: SimulatedCuda, name: str) -> bool:
    return any(name in cause for cause in cuda.counts.launches)


def shortfalls(folder: Path, asked: Items[Request], texts: Items[tuple[int, ...]]) -> list[float]:
    """Of each text: by how much a token was not the likeliest, at most, as transformers computes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    found = []
    for request, text in zip(asked, texts, strict=True):
        tokens = torch.tensor([(*request.prompt, *text)])
        with torch.inference_mode():
            logits = model(tokens).logits[0, len(request.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        found.append(float((logits.amax(dim=1) - chosen).max()))
    return found


@pytest.mark.parametrize("way", ways([*WAYS], FAILING))
def test_text_is_the_cpu_s(folder: Path, way: Way) -> None:
    asked = requests(greedy=not way.is_exact)
    with simulated_cuda(flash=way.flash) as cuda:
        texts = texts_of(generate(engine_of(folder, device="cuda", **way.settings), None, asked, 0))
    assert launched(cuda, way.launched)
    if way.is_exact:
        assert texts == on_the_cpu(folder)
    else:
        assert max(shortfalls(folder, asked, texts)) < NEAR_TIE


@dataclass
class Guesses(Drafter):
    """Knows the texts; every token follows wrong siblings, and every fifth is missing.

    So what is kept of a tree has to move in the cache, and the rest to be rolled back.
    """

    texts: dict[tuple[int, ...], tuple[int, ...]]
    siblings: int
    drafted: list[int] = field(default_factory=list)

    def propose(self, asked: Items[Asked]) -> list[Draft]:
        return [self._draft(one) for one in asked]

    def _draft(self, asked: Asked) -> Draft:
        length = asked.text.prompt_length
        done = len(asked.text.tokens) - length
        text = self.texts[tuple(asked.text.tokens[:length])]
        draft, parent = Draft(), ROOT
        for place in range(done, min(done + asked.depth, len(text))):
            right = text[place]
            guessed = [(right + n) % VOCAB_SIZE for n in range(1, 1 + self.siblings)]
            if place % 5 < 4:
                guessed.append(right)
            elif not guessed:
                guessed = [right ^ 1]
            draft = Draft((*draft.tokens, *guessed), (*draft.parents, *[parent] * len(guessed)))
            parent = len(draft) - 1
        return draft

    def forget(self, text: Text) -> None:
        pass


@pytest.mark.parametrize("siblings", [0, 1], ids=["chains", "trees"])
@pytest.mark.parametrize("way", ways([name for name in WAYS if name not in FAILING], {}))
def test_drafts_change_nothing(folder: Path, way: Way, siblings: int) -> None:
    """Drafts are verified, kept in part, moved and rolled back."""
    asked = requests(greedy=not way.is_exact)
    with simulated_cuda(flash=way.flash):
        target = engine_of(folder, device="cuda", **way.settings)
        plain = on_the_cpu(folder) if way.is_exact else texts_of(generate(target, None, asked, 0))
        known = {request.prompt: text for request, text in zip(asked, plain, strict=True)}
        outputs = generate(target, Guesses(known, siblings), asked, 4)
    assert sum(output.accepted for output in outputs) > COUNT * len(asked) // 3
    assert sum(output.drafted - output.accepted for output in outputs) >= len(asked)
    if way.is_exact:
        assert texts_of(outputs) == plain
    else:
        assert max(shortfalls(folder, asked, texts_of(outputs))) < NEAR_TIE


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_a_draft_model_on_the_gpu_drafts_what_it_does_on_the_cpu(folder: Path, verification: str) -> None:
    """By every rule; ahead of the verdicts too, where the rule allows it."""
    asked = requests(temperature=0.8, top_p=0.95, verification=verification)
    leaves = 2 if verification == "coupled" else 0

    def answered(device: str) -> list[Output]:
        target = engine_of(folder, device=device, dtype="float32")
        draft = engine_of(folder, device=device, dtype="bfloat16", draft_ahead=6)
        return generate(target, DraftModel(draft), asked, 3, leaves)

    expected = answered("cpu")
    with simulated_cuda():
        outputs = answered("cuda")
    assert texts_of(outputs) == texts_of(expected)
    assert sum(output.accepted for output in outputs) > COUNT


def test_a_short_cache_changes_nothing(folder: Path) -> None:
    block = 8 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, kv heads, dimension, float32
    with simulated_cuda():
        engine = engine_of(folder, device="cuda", dtype="float32", cache_memory=12 * block)
        asked = requests()
        opened = [engine.open(len(one.prompt), one.noise_key, one.sampling) for one in asked]
        for sequence, request in zip(opened, asked, strict=True):
            engine.submit(Generate(sequence.number, 0, request.prompt, COUNT))
        preemptions = 0
        while engine.has_work:
            for result in engine.step():
                assert isinstance(result, Generated)
                preemptions += result.timings.preemptions
                if result.finish is not None:
                    engine.close(opened[result.sequence])
    assert preemptions > 0
    texts = [tuple(one.tokens[one.prompt_length :]) for one in opened]
    assert texts == on_the_cpu(folder)


def test_the_self_check_passes_and_a_second_gpu_will_do(folder: Path) -> None:
    with simulated_cuda():
        engine = engine_of(folder, device="cuda:1", dtype="float32", self_check=True)
        assert engine.settings.device == "cuda:1"
        assert torch.cuda.current_device() == 1
        assert texts_of(generate(engine, None, requests(), 0)) == on_the_cpu(folder)
