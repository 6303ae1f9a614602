"""States of a sequence's drafter: immutable values. DrafterHealth moves from state to state."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.telemetry.reasons import DepthReason


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftState:
    """Base of the states."""

    losses: int = 0  # draft workers lost while they had the sequence, since its newest Draft
    reason: ClassVar[DepthReason | None] = None  # why there are no Drafts; None: there may be Drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsOff(DraftState):
    """The request wants no Drafts."""

    reason: ClassVar[DepthReason] = DepthReason.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsCold(DraftState):
    """The drafter has not been given the prompt yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsReady(DraftState):
    """The drafter can be asked for Drafts."""

    empty: int = 0  # consecutive Drafts without a token


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsLate(DraftState):
    """A Draft missed its deadline: the drafter has to catch up first."""

    retry_at: float  # the event loop's time
    reason: ClassVar[DepthReason] = DepthReason.LATE


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsSilent(DraftState):
    """Many consecutive Drafts had no token: the drafter is asked again once the text is longer."""

    until_length: int  # length of the sequence at which the drafter is asked again, in tokens
    empty: int  # consecutive Drafts without a token
    reason: ClassVar[DepthReason] = DepthReason.EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsLost(DraftState):
    """The drafter's worker was lost: another worker has to catch up first."""

    retry_at: float  # the event loop's time
    reason: ClassVar[DepthReason] = DepthReason.LOST
