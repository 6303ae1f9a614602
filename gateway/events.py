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
    """Base of events that have a reason and nothing else."""

    reason: str


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """One Draft and its Verdict are under way."""

    reason: str  # what decided the depth
    waits: bool = False  # the round begins with waiting for its Draft
    continued: bool = False  # the target has the Draft already


class PlainBegan(WithReason):
    """Plain decoding is under way."""


@dataclass(frozen=True, slots=True)
class SendingAhead:
    """The next round's Draft is about to go to the target, before the Verdict that it follows."""

    proposal: Proposal


class AheadDropped(WithReason):
    """The target has continued with a Draft that was sent ahead; its Verdict is dropped."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafter answered."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class DraftAwaited:
    """The wait for the round's Draft is over, with a Draft or without."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FellBack:
    """The drafter failed or has nothing to say: there are no Drafts until it has recovered."""

    reason: str  # DepthReason LATE, LOST or EMPTY
    detail: str
    is_fault: bool = True  # False: an index has nothing to say
    waited_s: float | None = None  # seconds that the target waited for a late Draft; None: none was late


class Resumed(WithReason):
    """The drafter has a Draft again, and rounds pay."""


@dataclass(frozen=True)
class VerdictReceived:
    """The round is over, its tokens are committed."""

    proposal: Proposal
    reply: rounds_pb2.TargetReply
    reason: str  # what decided the depth
    continued: bool
    draft_s: float  # seconds of the wait for its Draft
    target_s: float  # seconds of the wait for its Verdict

    @property
    def overhead_s(self) -> float:
        """Seconds from turn to Verdict outside of the target worker; 0 if the target continued by itself.

        They leave out time in which a slow client kept the gateway from waiting for the Verdict.
        """
        return 0.0 if self.continued else max(self.target_s - self.reply.timings.total_ns / 1e9, 0.0)

    # A drafted token that a grammar forced is no guess: neither drafted, nor reached, nor accepted. Several
    # listeners ask, so what takes a loop is computed once.

    @property
    def drafted(self) -> int:
        """Tokens of the Draft."""
        return len(self.proposal.draft) - len(self.reply.forced_nodes)

    @cached_property
    def drafted_end(self) -> int | None:
        """Node of the Draft that guessed the token with which the sequence ends; None: no node did.

        The end is the target's own token, so the Verdict does not list the node, though it is correct.
        """
        if not self.reply.finish_reason:
            return None
        last = self.reply.tokens[-1]
        tokens, forced = self.proposal.draft.tokens, self.reply.forced_nodes
        return next((node for node in self._following if tokens[node] == last and node not in forced), None)

    @cached_property
    def correct(self) -> list[int]:
        """Nodes of the Draft that equal what the target said, root first."""
        end = self.drafted_end
        return [*self.reply.accepted, *(() if end is None else (end,))]

    @property
    def accepted(self) -> int:
        """Drafted tokens that are correct."""
        return len(self.correct) - self.forced_nodes

    @property
    def reached(self) -> int:
        """Drafted tokens that the target judged: the correct tokens, and the first refused token."""
        return self.accepted + self.is_refused

    @cached_property
    def is_refused(self) -> bool:
        """Whether a drafted token follows the correct tokens and is not what the target said there."""
        following = self._following
        tokens = {self.proposal.draft.tokens[node] for node in following}
        if self.reply.finish_reason and self.reply.tokens[-1] in tokens:
            return False
        return bool(following) and following.isdisjoint(self.reply.forced_nodes)

    @cached_property
    def chain(self) -> Agreement:
        """Correct and reached tokens of the Draft's chain, without tokens that a grammar forced.

        What an index adds beyond the depth that was asked for tells nothing of that depth's positions.
        """
        path, depth = self.reply.accepted, self.proposal.asked_length
        of_chain = [node for node in path if node < depth]
        correct = sum(node not in self.reply.forced_nodes for node in of_chain)
        is_wrong = len(of_chain) < depth and (len(path) > len(of_chain) or self.is_refused)
        return Agreement(correct, correct + is_wrong)

    @cached_property
    def _following(self) -> set[int]:
        """Nodes after the last node that the Verdict lists."""
        path = self.reply.accepted
        end = path[-1] if path else ROOT
        return {node for node, parent in enumerate(self.proposal.draft.parents) if parent == end}

    @cached_property
    def forced_nodes(self) -> int:
        """Correct tokens of the Draft to which a grammar left no alternative."""
        forced = self.reply.forced_nodes
        return sum(node in forced for node in self.reply.accepted) if forced else 0

    @property
    def forced(self) -> int:
        """Tokens that a grammar forced, in the Draft or beyond it."""
        return self.forced_nodes + self.reply.forced


@dataclass(frozen=True, slots=True)
class TokenDecoded:
    """A token of plain decoding is committed, perhaps after the Draft of a round was sent."""

    reply: rounds_pb2.TargetReply
    target_s: float  # seconds of the wait for the token


class Overtaken(Agreement):
    """The beginning of a Draft, and the tokens that the target decoded before the Draft came."""


class Compared(Agreement):
    """A guess that was made during plain decoding and never verified, and the text that followed."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A drafter drafts from now on."""

    drafter: str
    reason: str
    share: float | None = None  # part of the sequences that a new draft drafts; None: it is not new


@dataclass(frozen=True, slots=True)
class GuessJudged:
    """The text has judged a guess of a drafter that does not draft this sequence."""

    drafter: str
    correct: int  # tokens
    guess: Proposal

    @property
    def reached(self) -> int:
        """Tokens asked for that the text judges. A missing token counts as a wrong guess."""
        return min(self.correct + 1, self.guess.wanted)


class Ended(WithReason):
    """Plain decoding is over, or a round that will have no Verdict."""


@dataclass(frozen=True, slots=True)
class Switched:
    """The sequence changes between rounds and plain decoding."""

    to: str  # "on" or "off"
    reason: str


@dataclass(frozen=True, slots=True)
class TargetLost:
    """A target was lost, and the sequence goes on at another."""

    detail: str
    is_first: bool  # False: a target was lost before, and no token came in between


class SecondOpened(WithReason):
    """The sequence is opened at a second target, for a MoveReason."""


@dataclass(frozen=True, slots=True)
class SecondEnded:
    """The second target goes on with the sequence, or has stopped."""

    reason: str  # MoveReason
    seconds: float  # time for which both targets had the sequence
    goes_on: bool  # whether the sequence goes on there


class SequenceFailed(WithReason):
    """The sequence ends with an error."""


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
    """Calls each listener for each event, in the order in which they were added."""

    def __init__(self, listeners: Iterable[EventListener] = ()) -> None:
        self._listeners = [*listeners]

    def add(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener.on(event)
