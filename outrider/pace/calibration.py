"""Correction of predicted costs: measured over predicted time of rounds, relative to plain decoding."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.pace.tuning import TUNING

_DEPTHS = TUNING.calibration_depths


@dataclass
class _Rounds:
    """Times and tokens of the rounds of one drafter."""

    time: float = 1.0  # mean of taken / expected
    own: list[float] = field(default_factory=lambda: [1.0] * len(_DEPTHS))  # further factor of it, by depth
    tokens: float = 1.0  # mean tokens of a round
    expected_tokens: float = 1.0  # mean expected tokens of a round
    steps: int = 0  # steps for which sequences have been in rounds; 0: none is
    failed: int = 0  # times in a row that its rounds were soon given up

    @property
    def fading(self) -> float:
        """Steps without rounds after which their calibration is 1/e: more after each vain trial."""
        return TUNING.calibration_fading * 2.0 ** min(self.failed, TUNING.calibration_doublings)


class Calibration:
    """Compares the time that rounds and plain decoding take with the time that was expected.

    Costs describe single steps, and depths are chosen by estimated rates. Only the running batch shows what
    costs and rates leave out. A draft on the same machine slows the target's steps down. Sequences come back
    too late for their step. The best of several estimates is mostly too good. Delays of both kinds of
    decoding, such as prompts, cancel out. Rounds that are not seen for a while count more and more as plain
    decoding does. So a drafter that did not pay is tried again.

    Each drafter has its own rounds, since its Drafts are made on other machines. A drafter without rounds
    counts as the mean of all drafters. Deep rounds may miss their speed by more than shallow rounds, so the
    rest is learned by depth, more slowly.

    A round whose Draft was late has a short time and one token. A usual round has a long time and several
    tokens. So the means of times and of tokens are arithmetic: their quotient is the speed of all rounds.
    """

    def __init__(self) -> None:
        self._plain = 1.0  # mean of time taken / expected, while nothing is drafted
        self._beside_rounds = 1.0  # further factor of it, while sequences at the target are in rounds
        self._rounds: defaultdict[str, _Rounds] = defaultdict(self._usual)  # key: drafter

    def factors(self, drafter: str) -> NDArray[np.float64]:
        """[MAX_DEPTH] by depth: factor by which the drafter's rounds take longer for their tokens."""
        rounds = self._rounds[drafter]
        time = rounds.time / self._plain * np.repeat(rounds.own, np.diff(_DEPTHS, prepend=0))
        return np.asarray(time * rounds.expected_tokens / rounds.tokens)

    @property
    def plain_factor(self) -> float:
        """Factor by which plain decoding takes longer while other sequences are in rounds."""
        return self._beside_rounds

    def observe_round(
        self, drafter: str, depth: int, seconds: float, expected_s: float, sequences: int
    ) -> None:
        """Learns how many seconds a sequence waited from one Verdict to the next.

        sequences: sequences in rounds with that drafter; each makes an observation.
        """
        rounds = self._rounds[drafter]
        alike = min(bisect_left(_DEPTHS, depth), len(_DEPTHS) - 1)
        own = rounds.own[alike]
        found = _ratio(seconds, expected_s, rounds.time * own)
        rounds.own[alike] += (found / rounds.time - own) / (TUNING.calibration_depth_memory * sequences)
        rounds.time += (found / own - rounds.time) / (TUNING.calibration_memory * sequences)

    def observe_plain(
        self, seconds: float, expected_s: float, sequences: int, is_trial: bool = False
    ) -> None:
        """Learns how many seconds a sequence waited from one token of plain decoding to the next.

        is_trial: sequences are in rounds, but for these few tokens.
        """
        memory = TUNING.calibration_trial_memory if is_trial else TUNING.calibration_memory
        self._plain += (_ratio(seconds, expected_s, self._plain) - self._plain) / (memory * sequences)

    def observe_plain_beside_rounds(self, seconds: float, expected_s: float, sequences: int) -> None:
        """Learns how many seconds a token of plain decoding took while other sequences were in rounds.

        Only this shows what rounds cost the sequences that are not in them: a draft on the target's device
        slows every step down.
        """
        found = _ratio(seconds, expected_s, self._plain * self._beside_rounds) / self._plain
        self._beside_rounds += (found - self._beside_rounds) / (TUNING.calibration_memory * sequences)

    def observe_tokens(self, drafter: str, tokens: float, expected: float, sequences: int) -> None:
        """Learns how many tokens a Verdict on a Draft gave."""
        rounds, newest = self._rounds[drafter], 1.0 / (TUNING.calibration_memory * sequences)
        rounds.tokens += newest * (tokens - rounds.tokens)
        rounds.expected_tokens += newest * (expected - rounds.expected_tokens)

    def observe_step(self, drafters: Collection[str]) -> None:
        """Learns which drafters have sequences in rounds at a step; empty: all decode plainly."""
        like = _mean([self._rounds[name] for name in drafters]) if drafters else _Rounds(time=self._plain)
        if not drafters:
            self._beside_rounds += (1.0 - self._beside_rounds) / TUNING.calibration_fading
        for name, rounds in self._rounds.items():
            rounds.own = [own + (1.0 - own) / TUNING.calibration_fading for own in rounds.own]
            if name in drafters:
                rounds.steps += 1
                continue
            if rounds.steps:
                rounds.failed = rounds.failed + 1 if rounds.steps < TUNING.calibration_fading else 0
                rounds.steps = 0
            tokens = rounds.expected_tokens * like.tokens / like.expected_tokens
            rounds.time += (like.time - rounds.time) / rounds.fading
            rounds.tokens += (tokens - rounds.tokens) / rounds.fading

    def _usual(self) -> _Rounds:
        """Mean over the known drafters, for a drafter that had no rounds."""
        return _mean([*self._rounds.values()]) if self._rounds else _Rounds()


def _mean(rounds: Sequence[_Rounds]) -> _Rounds:
    return _Rounds(
        time=sum(each.time for each in rounds) / len(rounds),
        own=[sum(of_depth) / len(rounds) for of_depth in zip(*(each.own for each in rounds), strict=True)],
        tokens=sum(each.tokens for each in rounds) / len(rounds),
        expected_tokens=sum(each.expected_tokens for each in rounds) / len(rounds),
    )


def _ratio(seconds: float, expected_s: float, believed: float) -> float:
    """Taken / expected time, within limits around what it was believed to be."""
    limit = TUNING.calibration_limit
    return min(max(seconds / expected_s, believed / limit), believed * limit)
