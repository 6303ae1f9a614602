"""Plausible defects, planted in one of two services that share a process."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.decoding.verify
import outrider.engine.choosing.sampler
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft, Verdict
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import EngineSequence
from outrider.engine.tasks.decode import DecodeTask
from tests.support.local_worker import LocalWorker
from tests.support.patience import LIMIT_S
from tests.support.service import Service, service_of
from workshop.checking.check import check
from workshop.checking.deployment import Deployment
from workshop.checking.report import CheckReport
from workshop.checking.settings import CheckSettings

ONE_IN = 200  # in one of this number of rounds, the Draft is emitted unverified

Planted = AbstractContextManager[None]


@contextmanager
def _only_in(worker: LocalWorker, owner: Any, name: str, wrong: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function by ``wrong`` in one worker. ``wrong`` gets the original as its first argument."""
    right = getattr(owner, name)

    def either(*arguments: Any, **named: Any) -> Any:
        if threading.current_thread() is worker.behind.thread:
            return wrong(right, *arguments, **named)
        return right(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, either)
        yield


def _residual_sign(target: LocalWorker) -> Planted:
    def wrong(right: Any, draft: Draft, target_probs: Tensor, length: int, weight: float) -> Tensor:
        if length == len(draft):
            return right(draft, target_probs, length, weight)
        given = draft.draft_probs[length]
        leftover = -weight * target_probs[length].double()
        leftover[list(given.token_ids)] += torch.tensor(given.probs, dtype=torch.float64)
        return leftover.clamp(min=0.0)

    return _only_in(target, outrider.decoding.verify, "_leftover", wrong)


def _no_mask_at_bonus_token(target: LocalWorker) -> Planted:
    def wrong(right: Any, task: DecodeTask) -> list[ChoiceContext]:
        *rows, last = right(task)
        return [*rows, replace(last, mask=None) if rows else last]

    return _only_in(target, DecodeTask, "rows", wrong)


def _top_p_at_draft_only(target: LocalWorker) -> Planted:
    def wrong(right: Any, logits: Tensor, rows: list[ChoiceContext], *settings: Any) -> Tensor:
        whole = [replace(row, sampling=row.sampling.model_copy(update={"top_p": 1.0})) for row in rows]
        return right(logits, whole, *settings)

    return _only_in(target, outrider.engine.choosing.sampler, "process", wrong)


def _shared_block(target: LocalWorker) -> Planted:
    def wrong(right: Any, cache: PagedCache, sequence: EngineSequence, index: int) -> bytes:
        right(cache, sequence, index)
        sequence.hashes[:] = [bytes([digest[0] % 8]) for digest in sequence.hashes]  # so that blocks collide
        return sequence.hashes[index]

    return _only_in(target, PagedCache, "_digest", wrong)


def _unverified(target: LocalWorker) -> Planted:
    def wrong(right: Any, task: DecodeTask, draft: Draft, choices: Choices) -> Verdict:
        if not draft or hash((task.sequence.noise_key, task.round)) % ONE_IN:
            return right(task, draft, choices)
        path = max((draft.path(node) for node in range(len(draft))), key=len)
        return Verdict(tuple(path), (*(draft.tokens[node] for node in path), choices.chosen[1 + path[-1]]))

    return _only_in(target, DecodeTask, "_judge", wrong)


@dataclass(frozen=True)
class Defect:
    """Defect of service B, and the settings of the check that finds it."""

    plant: Callable[[LocalWorker], Planted] = lambda target: nullcontext()  # plants the defect in B's target
    b_target: Mapping[str, Any] = field(default_factory=dict)  # settings of B's target
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings of the check


SEEDED: dict[str, Any] = {"samples": 0}  # without the test of distributions
REJECTION = {"requests": 0, "verification": "rejection"}  # the test of distributions alone

DEFECTS = {
    "residual": Defect(_residual_sign, settings=REJECTION),
    "bonus": Defect(_no_mask_at_bonus_token, settings={**SEEDED, "kinds": ("json",)}),
    "top_p": Defect(_top_p_at_draft_only, settings={**SEEDED, "kinds": ("truncated",)}),
    "block": Defect(_shared_block, settings={**SEEDED, "kinds": ("greedy",)}),
    "bfloat16": Defect(b_target={"dtype": "bfloat16"}, settings=SEEDED),
    "unverified": Defect(_unverified, settings={**SEEDED, "kinds": ("greedy",)}),
}


@dataclass(frozen=True)
class Services:
    """Two services of the demo pair."""

    a: Service
    b: Service

    async def checked(self, defect: Defect, **settings: Any) -> CheckReport:
        """Runs the check with the defect in B. Both use a fixed depth, so that no pace hides it."""
        (target,) = self.b.of("target")
        asked = CheckSettings.model_validate({**defect.settings, **settings})
        sides = Deployment("A", self.a.http, "fixed"), Deployment("B", self.b.http, "fixed")
        with defect.plant(target):
            return await check(*sides, asked, lambda what, done, of: None)


@asynccontextmanager
async def services(b_target: Mapping[str, Any] = MappingProxyType({})) -> AsyncIterator[Services]:
    """Yields two services. b_target: settings of B's target that differ from A's."""
    patient = {"propose_deadline_ms": 1e3 * LIMIT_S}  # rounds must not lose their Drafts on a busy machine
    async with service_of(gateway=patient) as a, service_of(target=b_target, gateway=patient) as b:
        yield Services(a, b)
