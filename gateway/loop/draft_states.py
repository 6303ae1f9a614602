"""States of a sequence's drafter, as the sequence sees it: values, between which DraftSource moves."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.telemetry.reasons import DepthReason


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftState:
    """What every state knows."""

    losses: int = 0  # draft workers that were lost with the sequence since its newest Draft
    reason: ClassVar[DepthReason | None] = None  # why there are no Drafts; None: there may be some


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsOff(DraftState):
    """The request wants no Drafts."""

    reason: ClassVar[DepthReason] = DepthReason.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsCold(DraftState):
    """The drafter was not given the prompt yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsReady(DraftState):
    """The drafter may be asked."""

    empty: int = 0  # Drafts without a token, in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsLate(DraftState):
    """A Draft missed its deadline: the drafter has to catch up first."""

    retry_at: float  # the event loop's time
    reason: ClassVar[DepthReason] = DepthReason.LATE


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsSilent(DraftState):
    """Many Drafts in a row had no token: the text has to go on first."""

    until_length: int  # tokens of the sequence
    empty: int  # Drafts without a token, in a row
    reason: ClassVar[DepthReason] = DepthReason.EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftsLost(DraftState):
    """The drafter's worker was lost: another has to catch up first."""

    retry_at: float  # the event loop's time
    reason: ClassVar[DepthReason] = DepthReason.LOST
