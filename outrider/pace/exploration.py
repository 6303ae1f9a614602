"""Exploration: everything that is tried only to learn from it, and how often. Torch-free.

A controller learns about the choices that it makes, and nothing about the alternatives. In plain decoding, no
Verdict shows the acceptance rate of Drafts. While all sequences are in rounds, no step shows the cost of
plain decoding. A drafter that is never used stays unknown. So each choice would reinforce itself for ever.
Three kinds of exploration, each of small and bounded cost, prevent this:

- A *trial* measures the cost of the other kind of decoding (``Trials``). The sequences in rounds decode a few
  tokens plainly. If no sequence is in rounds, all sequences make a few rounds. A trial comes after 600 steps
  of one kind. The first trials come sooner, because the first measurements are the least reliable.
- A *probe* measures the acceptance rate of a sequence in plain decoding (``Probes``). Its drafter guesses,
  and the text or a round judges the guess. Probes become rarer while they change nothing.
- A *watch* measures the acceptance rate of a drafter that is not in use (``Watches``). It guesses for another
  drafter's sequence, and the text judges the guess. Watches spend a credit that grows with each sequence.

Some drafters make their Drafts between two steps of the target. All sequences wait for such a Draft, even if
only one sequence tries a round. So trials and probes of these drafters have a budget of the target's time
(``Budget``).

``PaceSettings.explores`` turns all exploration on or off. Without it, a choice that does not pay stays off
until the load changes.
"""

from collections.abc import Hashable, Mapping

from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING

NEVER = 1 << 40  # tokens; longer than any sequence
ROUNDING = 1e-9  # sequences; tolerance for rounding of the credit


class Trials:
    """Schedule of trials, in which all sequences of a target try the other kind of decoding."""

    def __init__(self) -> None:
        self._steps = 0  # steps since the kind of decoding in force changed or was tried
        self._is_drafting = False
        self._wait = TUNING.first_trial  # steps of one kind before a trial
        self._sequences = 1  # sequences at the last trial; twice as many call for another trial

    def observe_step(self, is_drafting: bool) -> None:
        """Counts a step of the target. is_drafting: whether any sequence is in rounds."""
        self._steps = self._steps + 1 if is_drafting is self._is_drafting else 0
        self._is_drafting = is_drafting

    def observe_load(self, sequences: int) -> None:
        """Brings the next trial forward if the load has doubled since the last trial."""
        if sequences >= 2 * self._sequences:
            self._steps = max(self._steps, self._wait - TUNING.first_trial)
            self._sequences = sequences

    def begin(self, settings: PaceSettings, sequences: int, debt_s: float = 0.0) -> int:
        """Begins a trial if it is due; returns its tokens of plain decoding, 0 if no trial begins.

        debt_s: seconds until the budget has paid for earlier trials; until then only plain decoding is tried.
        """
        wait = min(self._wait, settings.trial_steps)
        if not settings.explores or settings.policy != "measured" or self._steps < wait:
            return 0
        if debt_s and not self._is_drafting:
            return 0
        self._steps = 0
        self._wait = min(TUNING.rarer_trials * wait, settings.trial_steps)
        self._sequences = sequences
        return max(wait // TUNING.trial_steps_per_token, 1)


class Budget:
    """Budget of target time for trial rounds that make all sequences wait while plain decoding is faster."""

    def __init__(self) -> None:
        self._left_s = 0.0  # seconds; negative: debts

    def earn(self, seconds: float) -> None:
        """Adds the share for exploration of these seconds of the target."""
        self._left_s = min(self._left_s + TUNING.explored_share * seconds, TUNING.most_budget_s)

    def spend(self, seconds: float) -> None:
        """Subtracts the seconds by which tokens came later than in plain decoding; negative: earlier."""
        self._left_s -= seconds

    @property
    def debt_s(self) -> float:
        """Seconds of target time until the budget is no longer negative."""
        return max(-self._left_s, 0.0) / TUNING.explored_share


class Turns:
    """Next turns of one sequence that try the other kind of decoding, only to learn from them."""

    def __init__(self) -> None:
        self.left = 0
        self.is_probe = False  # the next round is a probe, because text alone cannot judge the Drafts

    def try_kind(self, is_drafting: bool, plain_tokens: int) -> None:
        """Joins a trial: a few rounds, or ``plain_tokens`` tokens of plain decoding."""
        self.left = plain_tokens if is_drafting else TUNING.trial_rounds

    def probe(self) -> None:
        """Makes the next turn a round: only a round can judge the Drafts."""
        self.left = max(self.left, 1)
        self.is_probe = True


class Probes:
    """Interval at which sequences of one task probe their drafter during plain decoding."""

    def __init__(self) -> None:
        self._failed = 0  # consecutive probes after which drafting did not resume

    def observe(self, succeeded: bool) -> None:
        """Counts a probe, which succeeds if drafting resumes after it."""
        self._failed = 0 if succeeded else self._failed + 1

    def interval(self, settings: PaceSettings, drafter: DrafterInfo, sequences: int) -> int:
        """Returns the number of plain tokens between two probes of a sequence.

        It grows with each consecutive probe that changed nothing. It also grows with the number of sequences,
        because many sequences learn as much from fewer probes each. A guess costs time if the draft shares a
        processor, and the draft must first prefill a new sequence's prompt. A probe of a target drafter is a
        round, and all sequences of the step wait for its Draft. So only one sequence probes at a time.

        sequences: sequences at the target.
        """
        if not settings.explores:
            return NEVER
        many = min(sequences, TUNING.most_probers)
        if not drafter.waits_in_step:
            many //= TUNING.probers
        return settings.probe_tokens * max(many, 1) << min(self._failed, TUNING.probe_doublings)


class Watches:
    """Choice of the drafters that guess for a new sequence of another drafter, to be compared."""

    def __init__(self) -> None:
        self._sequences = 0
        self._credit = TUNING.most_credit
        self._newest = Lru[tuple[Hashable, str], int](TUNING.most_watched)  # number of its newest sequence

    def begin(self, settings: PaceSettings, key: Hashable, known: Mapping[str, bool]) -> list[str]:
        """Returns the drafters that guess for a new sequence: all unknown drafters, or the next in turn.

        Args:
            key: class of sequences with acceptance rates of its own.
            known: by drafter, whether enough is known about it.
        """
        self._sequences += 1
        self._credit = min(self._credit + settings.exploration, TUNING.most_credit)
        if not settings.explores:
            return []
        in_turn = sorted(known, key=lambda name: self._newest.peek((key, name)) or 0)
        unknown = [name for name in in_turn if not known[name]]
        watched = []
        for name in [name for name in unknown if self._may_tell_more(key, name)] if unknown else in_turn[:1]:
            if self._credit > 1.0 - ROUNDING:
                self._credit -= 1.0
                self._newest.put((key, name), self._sequences)
                watched.append(name)
        return watched

    def _may_tell_more(self, key: Hashable, name: str) -> bool:
        """Whether a new watch is useful: no recent sequence is watched for the drafter already."""
        newest = self._newest.peek((key, name))
        return newest is None or self._sequences - newest >= TUNING.watch_again


def watch_tokens(settings: PaceSettings, is_known: bool) -> int:
    """Returns the tokens between two guesses of a watched drafter; fewer until enough is known about it."""
    return settings.probe_tokens if is_known else settings.probe_tokens // TUNING.unknown_factor
