"""Health of a sequence's drafter: whether it can be asked for Drafts, and its recovery if not.

``draft_states`` has the states. A drafter that is late, silent or lost only means plain decoding until it has
recovered: it never fails a request.
"""

import asyncio
import logging
from dataclasses import replace

from gateway.drafters.drafter import SequenceDrafter
from gateway.errors import SequenceLostError, WorkerLostError
from gateway.events import Events, FellBack
from gateway.loop.draft_states import (
    DraftsCold,
    DraftsLate,
    DraftsLost,
    DraftsOff,
    DraftsReady,
    DraftsSilent,
    DraftState,
)
from gateway.loop.growth import Growth, wait_forever
from gateway.routing.route import Route
from gateway.routing.tuning import TUNING
from gateway.sequence import GatewaySequence
from outrider.decoding.draft import Draft
from outrider.learning.backoff import Backoff
from outrider.telemetry.reasons import DepthReason

logger = logging.getLogger(f"ray.serve.{__name__}")

MANY_EMPTY = 4  # consecutive Drafts without a token that end rounds
SILENCE = Backoff(16, 1024)  # tokens of plain decoding before a silent drafter is asked again
MAX_DRAFT_LOSSES = 3  # draft workers lost in a row without a Draft: the sequence may be the cause
RECOVERY = Backoff(0.25, 30.0)  # seconds before an attempt to recover, from the second attempt in a row on


class DrafterHealth:
    """State machine of a sequence's drafter. Emits an event whenever Drafts stop for a while."""

    def __init__(
        self, sequence: GatewaySequence, route: Route, events: Events, growth: Growth, is_off: bool
    ) -> None:
        """is_off: whether the request wants no Drafts."""
        self._sequence = sequence
        self._route = route
        self._events = events
        self._growth = growth
        self._state: DraftState = DraftsOff() if is_off else DraftsCold()
        self._attempts = 0  # attempts to recover since the newest Draft
        self.taking_in: asyncio.Task[None] | None = None  # the drafter prefills the prompt

    @property
    def reason(self) -> DepthReason | None:
        """Reason why there are no Drafts; None: there may be Drafts."""
        return self._state.reason

    @property
    def is_off(self) -> bool:
        """Whether the request wants no Drafts."""
        return isinstance(self._state, DraftsOff)

    @property
    def is_cold(self) -> bool:
        """Whether the drafter has not been given the prompt yet."""
        return isinstance(self._state, DraftsCold)

    def start(self) -> None:
        """Sends the prompt to the drafter once; does not wait for the prefill."""
        if self.is_cold:
            self._become(DraftsReady())
            self.taking_in = asyncio.create_task(self._take_in(self._route.current().drafter))

    async def stop_taking_in(self) -> None:
        """Cancels the request to prefill the prompt: a request for a Draft follows, which includes that."""
        if self.taking_in is not None:
            self.taking_in.cancel()
            await asyncio.wait({self.taking_in})
            self.taking_in = None

    def changed(self) -> None:
        """Resets the count of empty Drafts, which the previous drafter made."""
        if isinstance(self._state, DraftsReady):
            self._become(replace(self._state, empty=0))

    def drafted(self, draft: Draft) -> None:
        """Records a Draft of the drafter, which may be empty."""
        self._attempts = 0
        self._become(DraftsReady(empty=0 if draft else self._empty + 1))

    def fall_silent(self) -> bool:
        """Ends rounds after too many consecutive empty Drafts; returns whether it does."""
        empty, is_index = self._empty, self._route.current().info.is_index
        if empty < MANY_EMPTY:
            return False
        # A draft worker is mostly silent because its context or cache is full. An index is silent if the text
        # has no repeats, which is no fault.
        is_fault = empty == MANY_EMPTY and not is_index
        pause = 1 if is_index else int(SILENCE.after(empty - MANY_EMPTY))
        silent = DraftsSilent(until_length=len(self._sequence) + pause, empty=empty)
        self._fall_back(silent, f"{empty} in a row", is_fault=is_fault)
        return True

    def late(self, patience_s: float, *, is_awaited: bool) -> None:
        """Ends rounds, since no Draft came within ``patience_s`` seconds.

        is_awaited: whether the target waited for the Draft.
        """
        state = DraftsLate(retry_at=self._retry_at(), losses=self._state.losses)
        self._fall_back(
            state, f"no Draft after {patience_s:.3f} s", waited_s=patience_s if is_awaited else 0.0
        )

    def lost(self, lost: WorkerLostError) -> None:
        """Ends rounds if they have not ended yet, since a draft worker was lost."""
        if self.reason is None:
            self._fall_back(self._after_loss(lost), str(lost))

    async def recovered(self) -> None:
        """Waits until the drafter can be asked again."""
        match self._state:
            case DraftsSilent(until_length=length, empty=empty):
                await self._growth.wait_for_length(length)
                self._become(DraftsReady(empty=empty))
            case DraftsReady(empty=empty) if empty:
                await self._growth.wait_for_length(len(self._sequence) + 1)
            case DraftsLate() | DraftsLost():
                await self.catch_up()

    async def catch_up(self) -> None:
        """Waits until the drafter has processed the committed tokens, however long that takes.

        The first attempt starts at once. Later attempts follow after growing pauses, with another drafter if
        possible. After MAX_DRAFT_LOSSES this never returns, since the sequence may be the cause.
        """
        await self.stop_taking_in()
        while True:
            match self._state:
                case DraftsLost(losses=losses) if losses >= MAX_DRAFT_LOSSES:
                    logger.error("%d draft workers were lost with a sequence: it goes on without", losses)
                    await wait_forever()
                case DraftsLate(retry_at=retry_at) | DraftsLost(retry_at=retry_at):
                    await asyncio.sleep(retry_at - asyncio.get_running_loop().time())
            try:
                taken_in = -TUNING.small_lag
                while len(self._sequence) - taken_in > TUNING.small_lag:
                    taken_in = len(self._sequence)
                    await self._route.current().drafter.propose(0)
            except WorkerLostError as lost:
                self._become(self._after_loss(lost))
                await self._route.replace_lost()
            else:
                self._become(DraftsReady(losses=self._state.losses))
                return

    @property
    def _empty(self) -> int:
        """Number of consecutive Drafts without a token."""
        return self._state.empty if isinstance(self._state, DraftsReady) else 0

    async def _take_in(self, drafter: SequenceDrafter) -> None:
        try:
            await drafter.propose(0)
        except WorkerLostError as lost:
            self.lost(lost)

    def _after_loss(self, lost: WorkerLostError) -> DraftsLost:
        losses = self._state.losses + isinstance(lost, SequenceLostError)
        return DraftsLost(retry_at=self._retry_at(), losses=losses)

    def _retry_at(self) -> float:
        """Returns the time of the next attempt to recover, in the event loop's time.

        The pause grows with each attempt in a row.
        """
        pause_s = RECOVERY.after(self._attempts - 1) if self._attempts else 0.0
        self._attempts += 1
        return asyncio.get_running_loop().time() + pause_s

    def _fall_back(
        self,
        state: DraftsLate | DraftsSilent | DraftsLost,
        detail: str,
        is_fault: bool = True,
        waited_s: float | None = None,
    ) -> None:
        """Ends rounds, until the drafter has recovered."""
        self._become(state)
        self._events.emit(FellBack(state.reason, detail, is_fault, waited_s))

    def _become(self, state: DraftState) -> None:
        if type(state) is not type(self._state):
            logger.debug("sequence %d: its drafter is %s", self._sequence.number, type(state).__name__)
        self._state = state
