"""Exploration: everything that is tried only to learn from it, and how often. Torch-free.

A controller learns about what it does, and nothing about what it does not do. In plain decoding, no Verdict
shows how good Drafts would be. While all sequences are in rounds, no step shows what plain decoding would
take. A drafter that never drafts stays unknown. So each choice would confirm itself for ever. Three small,
bounded expenses keep every choice open:

- A *trial* of the other kind of decoding shows what that costs. The sequences in rounds decode a few tokens
  plainly, or all sequences make a few rounds if none is in rounds (``Trials``). It comes after 600 steps of
  one kind. Early trials come sooner: first measurements are the worst.
- A *probe* shows how good Drafts would be for a sequence in plain decoding. Its drafter guesses, and the text
  or a round judges the guess (``Probes``). Probes that change nothing get rarer.
- A *watch* shows how good a drafter is that does not draft. It guesses for another drafter's sequence, and
  the text judges it (``Watches``). Watches use up a credit that grows by a fixed share per sequence.

All sequences wait for a Draft that is made between two steps of the target, also if one sequence alone tries
a round. So trials and probes of such drafters keep within a budget of the target's time (``Budget``).

``PaceSettings.explores`` turns all three off. What does not pay then stays off, until the load changes.
"""

from collections.abc import Hashable, Mapping

from outrider.drafters.registry import DrafterInfo
from outrider.learning.lru import Lru
from outrider.pace.settings import PaceSettings
from outrider.pace.tuning import TUNING

NEVER = 1 << 40  # tokens; more than any sequence has
ROUNDING = 1e-9  # sequences


class Trials:
    """When all sequences of a target try the other kind of decoding, for its cost."""

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
        """Hastens the next trial if the load has doubled since the last trial."""
        if sequences >= 2 * self._sequences:
            self._steps = max(self._steps, self._wait - TUNING.first_trial)
            self._sequences = sequences

    def begin(self, settings: PaceSettings, sequences: int, debt_s: float = 0.0) -> int:
        """Begins a trial if it is time; returns its tokens of plain decoding, 0 if no trial begins.

        debt_s: seconds until the budget has paid for earlier rounds in vain; plain decoding is tried anyway.
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
    """Budget of rounds that are tried while plain decoding is faster, and for which all sequences wait."""

    def __init__(self) -> None:
        self._left_s = 0.0  # seconds; negative: debts

    def earn(self, seconds: float) -> None:
        """Adds the share of these seconds of the target."""
        self._left_s = min(self._left_s + TUNING.explored_share * seconds, TUNING.most_budget_s)

    def spend(self, seconds: float) -> None:
        """Takes off seconds by which a token came later than by plain decoding; negative: earlier."""
        self._left_s -= seconds

    @property
    def debt_s(self) -> float:
        """Seconds of the target until the share has paid for what was tried."""
        return max(-self._left_s, 0.0) / TUNING.explored_share


class Turns:
    """Turns of the other kind that one sequence takes next, only to learn from them."""

    def __init__(self) -> None:
        self.left = 0
        self.is_probe = False  # the next round shows how good Drafts are, since no text can

    def try_kind(self, is_drafting: bool, plain_tokens: int) -> None:
        """Takes part in a trial: a few rounds, or that many tokens of plain decoding."""
        self.left = plain_tokens if is_drafting else TUNING.trial_rounds

    def probe(self) -> None:
        """Makes the next turn a round: only a round can judge the Drafts."""
        self.left = max(self.left, 1)
        self.is_probe = True


class Probes:
    """How rarely the sequences of one task probe their drafter while they are decoded plainly."""

    def __init__(self) -> None:
        self._failed = 0  # probes in a row that did not bring drafting back

    def observe(self, succeeded: bool) -> None:
        """Counts a probe, which succeeds if it brings drafting back."""
        self._failed = 0 if succeeded else self._failed + 1

    def interval(self, settings: PaceSettings, drafter: DrafterInfo, sequences: int) -> int:
        """Plain tokens from one probe of a sequence to its next.

        Their number grows with every probe in a row that changed nothing, and with the sequences: many
        sequences together learn as much by fewer probes of each. A guess costs time if the draft shares a
        processor, and the draft has to take in a new sequence's prompt. A probe of a target drafter is a
        round, and all sequences of the step wait for its Draft. So a single sequence probes at a time.

        sequences: sequences at the target.
        """
        if not settings.explores:
            return NEVER
        many = min(sequences, TUNING.most_probers)
        if not drafter.waits_in_step:
            many //= TUNING.probers
        return settings.probe_tokens * max(many, 1) << min(self._failed, TUNING.probe_doublings)


class Watches:
    """Which drafters guess for a new sequence that another drafter drafts."""

    def __init__(self) -> None:
        self._sequences = 0
        self._credit = TUNING.most_credit
        self._newest = Lru[tuple[Hashable, str], int](TUNING.most_watched)  # number of the newest sequence

    def begin(self, settings: PaceSettings, key: Hashable, known: Mapping[str, bool]) -> list[str]:
        """Returns the drafters that guess for a new sequence: all unknown drafters, or else the next in turn.

        Args:
            key: kind of sequences that have an acceptance of their own.
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
        """Whether no recent sequence is watched for the drafter already; its watch may suffice."""
        newest = self._newest.peek((key, name))
        return newest is None or self._sequences - newest >= TUNING.watch_again


def watch_tokens(settings: PaceSettings, is_known: bool) -> int:
    """Tokens from one guess of a watched drafter to its next; fewer until enough is known about it."""
    return settings.probe_tokens if is_known else settings.probe_tokens // TUNING.unknown_factor
