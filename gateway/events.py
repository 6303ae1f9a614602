"""Events of one sequence. The loop emits them; counters, spans, the pace and the router listen."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from gateway.proposal import Proposal
from outrider.decoding.draft import ROOT
from outrider.learning.agreement import Agreement
from protos import rounds_pb2


@dataclass(frozen=True)
class WithReason:
    """Base of events that have only a reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """A round has begun."""

    reason: str  # what decided the depth
    waits: bool = False  # whether the round first waits for its Draft
    continued: bool = False  # whether the target already has the round's Draft


class PlainBegan(WithReason):
    """Plain decoding has begun."""


@dataclass(frozen=True, slots=True)
class SendingAhead:
    """The next round's Draft is about to be sent to the target, before the current round's Verdict."""

    proposal: Proposal


class AheadDropped(WithReason):
    """The target verifies a next Draft that is no longer wanted; its Verdict will be dropped."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafter has returned a Draft, which may be empty."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class DraftAwaited:
    """The wait for the round's Draft is over, whether or not a Draft came."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FellBack:
    """Drafting stops until the drafter has recovered: it is late or lost, or its Drafts are empty."""

    reason: str  # DepthReason LATE, LOST or EMPTY
    detail: str
    is_fault: bool = True  # False: an index finds no match, or the drafter is still silent
    waited_s: float | None = None  # seconds that the target waited for a late Draft; None: no Draft is late


class Resumed(WithReason):
    """Rounds begin again after plain decoding."""


@dataclass(frozen=True)
class VerdictReceived:
    """The Verdict of a round has come, and its tokens are committed."""

    proposal: Proposal
    reply: rounds_pb2.TargetReply
    reason: str  # what decided the depth
    continued: bool
    draft_s: float  # seconds of the wait for its Draft
    target_s: float  # seconds of the wait for its Verdict

    @property
    def overhead_s(self) -> float:
        """Seconds from turn to Verdict outside of the target worker; 0 if the target continued by itself.

        Time in which a slow client kept the gateway from waiting for the Verdict is not included.
        """
        return 0.0 if self.continued else max(self.target_s - self.reply.timings.total_ns / 1e9, 0.0)

    # A drafted token that a grammar forced is no guess: it counts as neither drafted nor reached nor
    # accepted.
    # Properties that need a loop are cached, since several listeners read them.

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return len(self.proposal.draft) - len(self.reply.forced_nodes)

    @cached_property
    def drafted_end(self) -> int | None:
        """Node of the Draft that guessed the last token of the sequence; None: no node did.

        The last token is the target's own, so the Verdict does not list the node as accepted, though it is
        correct.
        """
        if not self.reply.finish_reason:
            return None
        last = self.reply.tokens[-1]
        tokens, forced = self.proposal.draft.tokens, self.reply.forced_nodes
        return next((node for node in self._following if tokens[node] == last and node not in forced), None)

    @cached_property
    def correct(self) -> list[int]:
        """Nodes of the Draft that equal the target's tokens, in order from the root."""
        end = self.drafted_end
        return [*self.reply.accepted, *(() if end is None else (end,))]

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that are correct."""
        return len(self.correct) - self.forced_nodes

    @property
    def reached(self) -> int:
        """Number of drafted tokens that the target judged: the correct tokens and the first refused token."""
        return self.accepted + self.is_refused

    @cached_property
    def is_refused(self) -> bool:
        """Whether the Draft continues after the correct tokens with a token that the target refused."""
        following = self._following
        tokens = {self.proposal.draft.tokens[node] for node in following}
        if self.reply.finish_reason and self.reply.tokens[-1] in tokens:
            return False
        return bool(following) and following.isdisjoint(self.reply.forced_nodes)

    @cached_property
    def chain(self) -> Agreement:
        """Correct and reached tokens of the Draft's chain, without tokens that a grammar forced.

        Tokens that an index adds beyond the requested depth say nothing about the positions within that
        depth.
        """
        path, depth = self.reply.accepted, self.proposal.asked_length
        of_chain = [node for node in path if node < depth]
        correct = sum(node not in self.reply.forced_nodes for node in of_chain)
        is_wrong = len(of_chain) < depth and (len(path) > len(of_chain) or self.is_refused)
        return Agreement(correct, correct + is_wrong)

    @cached_property
    def _following(self) -> set[int]:
        """Children of the last node that the Verdict lists."""
        path = self.reply.accepted
        end = path[-1] if path else ROOT
        return {node for node, parent in enumerate(self.proposal.draft.parents) if parent == end}

    @cached_property
    def forced_nodes(self) -> int:
        """Number of correct tokens of the Draft that a grammar forced."""
        forced = self.reply.forced_nodes
        return sum(node in forced for node in self.reply.accepted) if forced else 0

    @property
    def forced(self) -> int:
        """Number of tokens that a grammar forced, in the Draft or after it."""
        return self.forced_nodes + self.reply.forced


@dataclass(frozen=True, slots=True)
class TokenDecoded:
    """A token of plain decoding is committed, possibly after the Draft of the next round was sent."""

    reply: rounds_pb2.TargetReply
    target_s: float  # seconds of the wait for the token


class Overtaken(Agreement):
    """Comparison of a Draft's beginning with tokens that the target decoded before the Draft came."""


class Compared(Agreement):
    """Comparison of an unverified guess, made during plain decoding, with the text that followed."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A drafter was chosen, and drafts from now on."""

    drafter: str
    reason: str
    share: float | None = None  # share of the sequences that a new draft gets; None: the drafter is not new


@dataclass(frozen=True, slots=True)
class GuessJudged:
    """The guess of a drafter that does not draft this sequence was compared with the text."""

    drafter: str
    correct: int  # tokens
    guess: Proposal

    @property
    def reached(self) -> int:
        """Number of requested tokens that the text judges. A missing token counts as a wrong guess."""
        return min(self.correct + 1, self.guess.wanted)


class Ended(WithReason):
    """Plain decoding has ended, or a round has ended without a Verdict."""


@dataclass(frozen=True, slots=True)
class Switched:
    """The sequence changes between rounds and plain decoding."""

    to: str  # "on" or "off"
    reason: str


@dataclass(frozen=True, slots=True)
class TargetLost:
    """A target was lost, and the sequence continues at another target."""

    detail: str
    is_first: bool  # False: a target was lost before, and no token came in between


class SecondOpened(WithReason):
    """The sequence was opened at a second target; the reason is a MoveReason."""


@dataclass(frozen=True, slots=True)
class SecondEnded:
    """The sequence continues at its second target, or was closed there."""

    reason: str  # MoveReason
    seconds: float  # time for which both targets had the sequence
    takes_over: bool  # whether the sequence continues at the second target


class SequenceFailed(WithReason):
    """The sequence has ended with an error."""


Event = (
    RoundBegan
    | PlainBegan
    | SendingAhead
    | AheadDropped
    | Drafted
    | DraftAwaited
    | FellBack
    | Resumed
    | VerdictReceived
    | TokenDecoded
    | Overtaken
    | Compared
    | Routed
    | GuessJudged
    | Ended
    | Switched
    | TargetLost
    | SecondOpened
    | SecondEnded
    | SequenceFailed
)


class EventListener(Protocol):
    def on(self, event: Event) -> None: ...


class Events:
    """Passes each event to all listeners, in the order in which they were added."""

    def __init__(self, listeners: Iterable[EventListener] = ()) -> None:
        self._listeners = [*listeners]

    def add(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener.on(event)
