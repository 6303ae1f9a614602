"""What speculation did."""

from collections import Counter
from dataclasses import dataclass, field

from gateway.events import (
    DraftAwaited,
    Drafted,
    Event,
    FellBack,
    GuessJudged,
    RoundBegan,
    Routed,
    SequenceFailed,
    Switched,
    TargetLost,
    TokenDecoded,
    VerdictFell,
)
from outrider.telemetry.reasons import DepthReason

BY_DRAFTER = ("rounds", "drafted", "verified", "accepted")
JUDGED = ("verified", "right")


@dataclass
class Stats:
    """What speculation did for one sequence, or for several together."""

    rounds: int = 0  # verdicts on a Draft that was not empty
    drafted: int = 0  # tokens
    verified: int = 0  # drafted tokens whose position was reached
    forced: int = 0  # tokens that stand because a grammar left nothing else; they count as nothing else
    ends: int = 0  # accepted tokens that end an answer: the target said these itself too
    accepted_lengths: Counter[int] = field(default_factory=Counter)  # rounds by accepted tokens
    prepared_for: int = 0  # verdicts for which the draft worker had prepared
    ahead_hits: Counter[int] = field(default_factory=Counter)  # of them, by the rank of their last token
    continued: int = 0  # rounds whose Draft the target held before it had finished the round before
    saved_s: float = 0.0  # in steps of the draft that were over when the Draft was asked for
    wasted: int = 0  # tokens that were drafted for other verdicts
    target_passes: int = 0  # verdicts, with a Draft or without
    draft_s: float = 0.0  # that rounds waited for a Draft
    target_s: float = 0.0  # that the sequence waited for verdicts
    drafted_by: Counter[tuple[str, str]] = field(default_factory=Counter)  # (drafter, what: see BY_DRAFTER)
    routed: Counter[tuple[str, str]] = field(default_factory=Counter)  # times that (drafter, why) was taken
    judged: Counter[tuple[str, str]] = field(default_factory=Counter)  # (drafter, "verified" or "right")
    transitions: Counter[tuple[str, str]] = field(default_factory=Counter)  # ("on" or "off", reason)
    late_drafts: int = 0  # times that a Draft missed its deadline
    lost_drafts: int = 0  # times that the draft worker was lost
    empty_drafts: int = 0  # times that the draft worker had nothing to say, again and again
    lost_targets: int = 0  # times that the target worker was lost
    failures: Counter[str] = field(default_factory=Counter)  # of the sequence, by reason

    def on(self, event: Event) -> None:
        """Counts what happened."""
        match event:
            case VerdictFell():
                self.target_passes += 1
                self.target_s += event.target_s
                self.forced += event.forced
                if event.proposal.draft:
                    self.rounds += 1
                    self.drafted += event.drafted
                    self.verified += event.verified
                    self.accepted_lengths[event.accepted] += 1
                    self.ends += event.drafted_end is not None
                    counts = 1, event.drafted, event.verified, event.accepted
                    for what, count in zip(BY_DRAFTER, counts, strict=True):
                        self.drafted_by[event.proposal.drafter, what] += count
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
                self.routed[event.drafter, event.reason] += 1
            case GuessJudged():
                self.judged[event.drafter, "verified"] += event.verified
                self.judged[event.drafter, "right"] += event.right
            case FellBack():
                self.late_drafts += event.reason == DepthReason.LATE
                self.lost_drafts += event.reason == DepthReason.LOST
                self.empty_drafts += event.reason == DepthReason.EMPTY and event.is_fault
            case Switched():
                self.transitions[event.to, event.reason] += 1
            case TargetLost():
                self.lost_targets += event.is_first
            case SequenceFailed():
                self.failures[event.reason] += 1

    @property
    def accepted(self) -> int:
        """Drafted tokens that stand."""
        return sum(length * rounds for length, rounds in self.accepted_lengths.items())

    @property
    def saved_ms(self) -> float:
        return 1e3 * self.saved_s

    @property
    def tokens(self) -> int:
        """Committed: every Verdict adds one of the target's own, also an end that was drafted."""
        return self.accepted - self.ends + self.forced + self.target_passes

    @property
    def fallbacks(self) -> int:
        """To plain decoding, because there were no Drafts."""
        return self.late_drafts + self.lost_drafts + self.empty_drafts

    def accepted_at(self, position: int) -> int:
        """Drafted tokens that stand at this position of their Draft; the first is 0."""
        return sum(rounds for length, rounds in self.accepted_lengths.items() if length > position)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens per round; 0 without rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def histogram(self) -> list[int]:
        """Rounds that accepted 0, 1, 2, ... tokens."""
        return _listed(self.accepted_lengths)

    @property
    def ahead_hit_ranks(self) -> list[int]:
        """Verdicts prepared for that ended with the draft's first guess, its second, ..."""
        return _listed(self.ahead_hits)

    @property
    def by_drafter(self) -> dict[str, dict[str, int]]:
        """What each drafter did: where Drafts are mixed there are several."""
        names = dict.fromkeys(drafter for drafter, _ in self.drafted_by)
        return {name: {what: self.drafted_by[name, what] for what in BY_DRAFTER} for name in names}

    @property
    def routes(self) -> dict[str, dict[str, int]]:
        """Times that each drafter was taken to draft, by why it was."""
        names = dict.fromkeys(drafter for drafter, _ in self.routed)
        return {
            name: {why: times for (drafter, why), times in self.routed.items() if drafter == name}
            for name in names
        }

    @property
    def by_judged(self) -> dict[str, dict[str, int]]:
        """What each drafter guessed that did not draft."""
        names = dict.fromkeys(drafter for drafter, _ in self.judged)
        return {name: {what: self.judged[name, what] for what in JUDGED} for name in names}

    def add(self, other: "Stats") -> None:
        """Counts another sequence in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def _listed(counter: Counter[int]) -> list[int]:
    return [counter[number] for number in range(max(counter, default=-1) + 1)]
