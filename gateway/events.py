"""What happens to one sequence. Rounds and drafting tell it; stats, trace and pace listen."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.proposal import Proposal
from outrider.decoding.draft import ROOT
from protos import rounds_pb2


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """One Draft and its Verdict are under way."""

    reason: str  # of its depth
    waits: bool = False  # it begins with waiting for its Draft
    continued: bool = False  # the target has its Draft already


@dataclass(frozen=True, slots=True)
class PlainBegan:
    """The target decodes freely."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendingAhead:
    """The target is about to be sent the next round's Draft, before the Verdict falls that it follows."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Forgone:
    """The target has continued with that Draft, and nobody wants to know."""

    reason: str


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafter answered."""

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class DraftAwaited:
    """The round has its Draft, or knows that there is none."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FellBack:
    """There are no Drafts until the drafter has recovered."""

    reason: str  # DepthReason LATE, LOST or EMPTY
    detail: str
    is_fault: bool = True  # not so where an index has nothing to say


@dataclass(frozen=True, slots=True)
class Resumed:
    """The drafter has a Draft again, and rounds pay."""

    reason: str


@dataclass(frozen=True, slots=True)
class VerdictFell:
    """The round is over, its tokens are committed."""

    proposal: Proposal
    reply: rounds_pb2.TargetReply
    reason: str  # of the depth
    continued: bool
    draft_s: float  # that its Draft was waited for
    target_s: float  # that its Verdict was waited for

    @property
    def overhead_s(self) -> float:
        """From Verify to Verdict, outside of the target worker; 0 where the target continued by itself.

        What was not waited for, since a client took its time to read, is not in it.
        """
        return 0.0 if self.continued else max(self.target_s - self.reply.timings.total_ns / 1e9, 0.0)

    # A drafted token that a grammar forced is no guess: neither drafted, nor verified, nor accepted.

    @property
    def drafted(self) -> int:
        """Tokens of the Draft."""
        return len(self.proposal.draft) - len(self.reply.forced_nodes)

    @property
    def drafted_end(self) -> int | None:
        """Node of the Draft that is the end which the target came to; None: the end was not guessed.

        The target judges a guess by its own token, and its Verdict ends with an end of the sequence. So the
        node is right though the Verdict does not list it.
        """
        if not self.reply.finish_reason:
            return None
        last = self.reply.tokens[-1]
        tokens, forced = self.proposal.draft.tokens, self.reply.forced_nodes
        return next((node for node in self._following if tokens[node] == last and node not in forced), None)

    @property
    def standing(self) -> list[int]:
        """Nodes of the Draft that are what the target said, root first."""
        end = self.drafted_end
        return [*self.reply.accepted, *(() if end is None else (end,))]

    @property
    def accepted(self) -> int:
        """Drafted tokens that stand."""
        return len(self.standing) - self.forced_nodes

    @property
    def verified(self) -> int:
        """Drafted tokens whose position was reached: those that stand, and one that was refused."""
        return self.accepted + self.is_refused

    @property
    def is_refused(self) -> bool:
        """Whether a drafted token follows those that stand, and is not what the target said there."""
        following = self._following
        tokens = {self.proposal.draft.tokens[node] for node in following}
        if self.reply.finish_reason and self.reply.tokens[-1] in tokens:
            return False
        return bool(following) and following.isdisjoint(self.reply.forced_nodes)

    @property
    def _following(self) -> set[int]:
        """Nodes after the last one that the Verdict lists."""
        path = self.reply.accepted
        end = path[-1] if path else ROOT
        return {node for node, parent in enumerate(self.proposal.draft.parents) if parent == end}

    @property
    def forced_nodes(self) -> int:
        """Tokens of the Draft that stand because a grammar left nothing else."""
        forced = self.reply.forced_nodes
        return sum(node in forced for node in self.reply.accepted) if forced else 0

    @property
    def forced(self) -> int:
        """All such tokens, in the Draft or beyond it."""
        return self.forced_nodes + self.reply.forced


@dataclass(frozen=True, slots=True)
class TokenDecoded:
    """A stretch has one token more, committed. It may still come once the Draft of a round was sent."""

    reply: rounds_pb2.TargetReply
    target_s: float  # that it was waited for


@dataclass(frozen=True, slots=True)
class Guess:
    """That nobody verified, beside what the text says there."""

    right: int  # tokens
    guessed: int

    @property
    def verified(self) -> int:
        """Tokens of which this is known: those that are right, and one that is not."""
        return min(self.right + 1, self.guessed)


class Overtaken(Guess):
    """The beginning of a Draft: the target has decoded so many tokens by itself before it came to that."""


class Compared(Guess):
    """One that was made while the sequence was plain."""


@dataclass(frozen=True, slots=True)
class Routed:
    """From now on this drafter drafts."""

    drafter: str
    reason: str
    share: float | None = None  # of the sequences that it drafts, where it is new


@dataclass(frozen=True, slots=True)
class GuessJudged:
    """The text has shown how good a guess of another drafter was than the one that drafts."""

    drafter: str
    right: int  # tokens
    guess: Proposal

    @property
    def verified(self) -> int:
        """Tokens that it was asked for and of which this is known: not to say one is a wrong guess."""
        return min(self.right + 1, self.guess.wanted)


@dataclass(frozen=True, slots=True)
class Ended:
    """Of a stretch, or of a round that for this reason will have no Verdict."""

    reason: str


@dataclass(frozen=True, slots=True)
class Switched:
    """Between rounds and plain decoding."""

    to: str  # "on" or "off"
    reason: str


@dataclass(frozen=True, slots=True)
class TargetLost:
    """The sequence is opened at another."""

    detail: str
    is_first: bool  # of several in a row


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """Nothing goes on."""

    reason: str


Event = (
    RoundBegan
    | PlainBegan
    | SendingAhead
    | Forgone
    | Drafted
    | DraftAwaited
    | FellBack
    | Resumed
    | VerdictFell
    | TokenDecoded
    | Overtaken
    | Compared
    | Routed
    | GuessJudged
    | Ended
    | Switched
    | TargetLost
    | SequenceFailed
)


class EventListener(Protocol):
    def on(self, event: Event) -> None: ...


class Events:
    """Tells each listener of each event, in the order in which they are given."""

    def __init__(self, listeners: Iterable[EventListener] = ()) -> None:
        self._listeners = [*listeners]

    def add(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        for listener in self._listeners:
            listener.on(event)
