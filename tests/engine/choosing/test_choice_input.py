"""What kernels are told of the rows that choose, before there are rows, is what the rows say."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outrider.engine.loop.runner
from outrider.decoding.draft import Draft
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.choosing.sampler import Choosing, begin_choosing
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.inputs.choice_input import ChoiceInput, DraftRows, PackedRows
from outrider.engine.inputs.step_input import Feed
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from outrider.engine.tasks.task import Task
from outrider.engine.work import Score, plain_decoding
from tests.support.demo_pair import DRAFTERS, prompt_of
from tests.support.grammars import ids, json_grammar

KINDS = ("json", "stories", "code")


class Compared:
    """Sees what a runner would send with a step, and what it then chooses from. Counts rows."""

    def __init__(self) -> None:
        self.rows = self.nodes = self.trees = 0
        # To be looked at in the end: what is raised while a step runs is caught.
        self.differing: list[tuple[ChoiceInput, ChoiceInput]] = []

    def choice_input(
        self,
        _: ModelRunner,
        feeds: list[Feed],
        tasks: Sequence[Task],
        counts: list[int],
        drafts: list[Draft],
        positions: Sequence[int] = (),
    ) -> None:
        self._sent = ChoiceInput.of_feeds(feeds, [task.sequence for task in tasks], counts, drafts)
        self.trees += sum(feed.tree is not None for feed in feeds)

    def begin_choosing(
        self,
        logits: torch.Tensor,
        rows: ChoosingRows,
        are_finite: torch.Tensor,
        ranks: int = 1,
        drafts: Sequence[Draft] = (),
        packed: PackedRows | None = None,
        experts_read: torch.Tensor | None = None,
    ) -> Choosing:
        every = rows.every
        said = ChoiceInput.of_rows(every, DraftRows.of(drafts, rows.counts))
        same = self._sent.depth == said.depth and all(
            np.array_equal(getattr(self._sent, name), getattr(said, name)) for name in said.fields
        )
        if not same or (every and self._sent.are_truncated != said.are_truncated):
            self.differing.append((self._sent, said))
        self.rows += len(every)
        self.nodes += sum(map(len, drafts))
        return begin_choosing(logits, rows, are_finite, ranks, drafts, packed)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compared]:
    compared = Compared()
    monkeypatch.setattr(
        ModelRunner, "_choice_input", lambda runner, *given: compared.choice_input(runner, *given)
    )
    monkeypatch.setattr(outrider.engine.loop.runner, "begin_choosing", compared.begin_choosing)
    yield compared
    assert not compared.differing


@cache
def engine(model: Path, branches: int = 0) -> Engine:
    fields: dict[str, Any] = {"dtype": "float32", "threads": 1, "cache_memory": 2**26, "self_check": False}
    return Engine.from_settings(EngineSettings(model=str(model), draft_ahead=branches, **fields))


def asked(**sampling: Any) -> list[OfflineRequest]:
    prompts = [prompt_of(kind) for kind in KINDS]
    settings = Sampling(max_tokens=16, ignore_eos=True, **sampling)
    return [OfflineRequest(prompt, settings, noise_key(1, 0, prompt)) for prompt in prompts]


@pytest.mark.parametrize(
    ("draft", "branches", "sampling"),
    [
        (DEMO / "draft", 0, {"temperature": 0.0}),
        (DEMO / "draft", 3, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
        (DEMO / "draft", 0, {"temperature": 0.0, "verification": "block"}),
        (DRAFTERS / "parallel", 2, {"temperature": 0.7}),
        (DEMO / "draft", 3, {"temperature": 0.7, "noise_scope": "seed"}),
    ],
)
def test_of_drafts_and_of_their_verdicts(
    compared: Compared, draft: Path, branches: int, sampling: dict[str, Any]
) -> None:
    drafter = DraftModel(engine(draft, branches))
    generate(engine(DEMO / "target"), drafter, asked(**sampling), 4, alternatives=2)
    assert compared.rows > 100
    if sampling.get("verification") is None:
        assert compared.nodes > 50
        assert compared.trees > 10


def test_of_tokens_that_a_grammar_forces(compared: Compared) -> None:
    prompt = tuple(ids("Somebody as JSON: "))
    form = {"type": "object", "properties": {"surname": {"type": "string"}}, "required": ["surname"]}
    sampling = Sampling(max_tokens=24, grammar=json_grammar(form))
    generate(engine(DEMO / "target"), None, [OfflineRequest(prompt, sampling, 5)], 0)
    assert compared.nodes > 3


def test_rows_that_only_tell_of_tokens_are_left_out(compared: Compared) -> None:
    target = engine(DEMO / "target")
    prompts = [prompt_of(kind) for kind in KINDS[:2]]
    scored, grown = (target.open(len(prompt), 1, Sampling(logprobs=1)) for prompt in prompts)
    target.submit(Score(scored.number, 0, prompts[0], 1))
    target.submit(plain_decoding(grown.number, 0, prompts[1], 4))
    while target.has_work:
        target.step()
    assert compared.rows == 4
    for sequence in (scored, grown):
        target.close(sequence)
