"""Counters of speculation for one sequence or several."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from gateway.events import (
    DraftAwaited,
    Drafted,
    Event,
    FellBack,
    GuessJudged,
    RoundBegan,
    Routed,
    SecondEnded,
    SecondOpened,
    SequenceFailed,
    Switched,
    TargetLost,
    TokenDecoded,
    VerdictReceived,
)
from outrider.telemetry.reasons import DepthReason, MoveReason

CountsByName = defaultdict[str, Counter[str]]


def _by_name() -> CountsByName:
    return defaultdict(Counter)


@dataclass
class Stats:
    """Counters of one sequence, or of several together. Listens to the events of a sequence."""

    rounds: int = 0  # verdicts on Drafts that were not empty
    drafted: int = 0  # tokens
    reached: int = 0  # drafted tokens that the target judged
    forced: int = 0  # tokens that a grammar forced; no other counter of tokens includes them
    ends: int = 0  # accepted tokens that end an answer; each is also the target's own token
    lengths: Counter[int] = field(default_factory=Counter)  # rounds by number of accepted tokens
    prepared_for: int = 0  # verdicts before which a draft worker had drafted ahead
    ahead_hits: Counter[int] = field(default_factory=Counter)  # prepared verdicts by rank of their last token
    continued: int = 0  # rounds whose Draft the target had before the previous round was over
    saved_s: float = 0.0  # seconds of draft steps that were over when the Draft was requested
    wasted: int = 0  # tokens that were drafted for other verdicts
    host_drafts: int = 0  # rounds whose Draft the host of the target's GPU chose, position by position
    target_passes: int = 0  # verdicts, with a Draft or without
    draft_s: float = 0.0  # seconds in which rounds waited for a Draft
    target_s: float = 0.0  # seconds in which the sequence waited for verdicts
    drafted_by: CountsByName = field(default_factory=_by_name)  # rounds and tokens by drafter
    routed: CountsByName = field(default_factory=_by_name)  # choices by drafter, then by RouteReason
    judged: CountsByName = field(default_factory=_by_name)  # guessed tokens by drafter that did not draft
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)  # ("on" or "off", reason)
    late_drafts: int = 0  # times that a Draft missed its deadline
    lost_drafts: int = 0  # times that the draft worker was lost
    empty_drafts: int = 0  # times that a draft worker sent many empty Drafts in a row
    lost_targets: int = 0  # times that the target worker was lost
    hedges: int = 0  # times that a second target was asked because the first was late
    moves: int = 0  # times that the sequence moved to a second target
    second_s: float = 0.0  # seconds for which two targets had the sequence
    failures: Counter[str] = field(default_factory=Counter)  # failed sequences by FailureReason

    def on(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case VerdictReceived():
                self.target_passes += 1
                self.target_s += event.target_s
                self.forced += event.forced
                if event.proposal.draft:
                    self.rounds += 1
                    self.drafted += event.drafted
                    self.reached += event.reached
                    self.lengths[event.accepted] += 1
                    self.ends += event.drafted_end is not None
                    self.host_drafts += event.proposal.is_of_host
                    self.drafted_by[event.proposal.drafter].update(
                        rounds=1, drafted=event.drafted, reached=event.reached, accepted=event.accepted
                    )
            case TokenDecoded():
                self.target_passes += 1
                self.target_s += event.target_s
                self.forced += event.reply.forced
            case RoundBegan():
                self.continued += event.continued
            case DraftAwaited():
                self.draft_s += event.seconds
            case Drafted() if event.proposal.ahead is not None:
                ahead = event.proposal.ahead
                self.prepared_for += 1
                if ahead.tokens:
                    self.ahead_hits[ahead.rank or 0] += 1
                self.saved_s += ahead.saved_s
                self.wasted += ahead.wasted
            case Routed():
                self.routed[event.drafter][event.reason] += 1
            case GuessJudged():
                self.judged[event.drafter].update(reached=event.reached, correct=event.correct)
            case FellBack():
                self.late_drafts += event.reason == DepthReason.LATE
                self.lost_drafts += event.reason == DepthReason.LOST
                self.empty_drafts += event.reason == DepthReason.EMPTY and event.is_fault
            case Switched():
                self.transitions[event.to, event.reason] += 1
            case TargetLost():
                self.lost_targets += event.is_first
            case SecondOpened():
                self.hedges += event.reason == MoveReason.LATE
            case SecondEnded():
                self.moves += event.takes_over
                self.second_s += event.seconds
            case SequenceFailed():
                self.failures[event.reason] += 1

    @property
    def accepted(self) -> int:
        """Number of drafted tokens that are correct."""
        return sum(length * rounds for length, rounds in self.lengths.items())

    @property
    def saved_ms(self) -> float:
        return 1e3 * self.saved_s

    @property
    def tokens(self) -> int:
        """Number of committed tokens. ``ends`` are subtracted: they are the target's own tokens too."""
        return self.accepted - self.ends + self.forced + self.target_passes

    @property
    def fallbacks(self) -> int:
        """Number of changes to plain decoding because there were no Drafts."""
        return self.late_drafts + self.lost_drafts + self.empty_drafts

    def accepted_at(self, position: int) -> int:
        """Returns the number of correct tokens at a position of their Drafts; the first position is 0."""
        return sum(rounds for length, rounds in self.lengths.items() if length > position)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens per round; 0 without rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def accepted_lengths(self) -> list[int]:
        """Rounds that accepted 0, 1, 2, ... tokens."""
        return _listed(self.lengths)

    @property
    def ahead_hit_ranks(self) -> list[int]:
        """Verdicts drafted ahead for that ended with the draft's first guess, its second guess, ..."""
        return _listed(self.ahead_hits)

    def add(self, other: "Stats") -> None:
        """Adds the counters of another sequence."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, defaultdict):
                for key, counts in value.items():
                    getattr(self, name)[key].update(counts)
            else:
                setattr(self, name, getattr(self, name) + value)


def _listed(counter: Counter[int]) -> list[int]:
    return [counter[number] for number in range(max(counter, default=-1) + 1)]
