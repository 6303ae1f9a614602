"""Correction of predicted costs: measured / predicted time of rounds, relative to plain decoding."""

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
    """Mean times and tokens of the rounds of one drafter."""

    time: float = 1.0  # mean of measured / expected
    own: list[float] = field(default_factory=lambda: [1.0] * len(_DEPTHS))  # further factors, by depth class
    tokens: float = 1.0  # mean tokens of a round
    expected_tokens: float = 1.0  # mean expected tokens of a round
    steps: int = 0  # consecutive steps with sequences in rounds; 0: no sequence is in rounds
    failed: int = 0  # consecutive times that its rounds were soon given up

    @property
    def fading(self) -> float:
        """Steps without rounds in which the calibration decays to 1/e; doubled after each failed trial."""
        return TUNING.calibration_fading * 2.0 ** min(self.failed, TUNING.calibration_doublings)


class Calibration:
    """Compares measured times of rounds and of plain decoding with the expected times.

    Costs describe single steps, and depths are chosen by estimated rates. Only the running batch shows the
    effects that costs and rates leave out. A draft on the same machine slows the target's steps down.
    Sequences return too late for their step. The best of several estimates is usually too optimistic. Delays
    that affect both kinds of decoding, such as prefills, cancel out. While a drafter has no rounds, its
    factors decay to those of plain decoding. So a drafter that did not pay is tried again.

    Each drafter has factors of its own, because its Drafts are made on other machines. A drafter without
    rounds starts with the mean of all drafters. The error may be larger for deep rounds than for shallow
    rounds. So an additional factor for each class of depths is learned, more slowly.

    A round whose Draft was late has a short time and one token. A usual round has a long time and several
    tokens. So times and tokens are averaged separately: the quotient of the means is the speed of all rounds.
    """

    def __init__(self) -> None:
        self._plain = 1.0  # mean of measured / expected time of plain decoding
        self._beside_rounds = 1.0  # additional factor while other sequences are in rounds
        self._rounds: defaultdict[str, _Rounds] = defaultdict(self._usual)  # key: drafter

    def factors(self, drafter: str) -> NDArray[np.float64]:
        """Returns the factors by which rounds are slower per token than expected, by depth: [MAX_DEPTH]."""
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

        is_trial: whether the sequences are in rounds, except for these few tokens.
        """
        memory = TUNING.calibration_trial_memory if is_trial else TUNING.calibration_memory
        self._plain += (_ratio(seconds, expected_s, self._plain) - self._plain) / (memory * sequences)

    def observe_plain_beside_rounds(self, seconds: float, expected_s: float, sequences: int) -> None:
        """Learns how many seconds a token of plain decoding took while other sequences were in rounds.

        Only this shows what rounds cost the sequences in plain decoding. For example, a draft on the target's
        device slows every step down.
        """
        found = _ratio(seconds, expected_s, self._plain * self._beside_rounds) / self._plain
        self._beside_rounds += (found - self._beside_rounds) / (TUNING.calibration_memory * sequences)

    def observe_tokens(self, drafter: str, tokens: float, expected: float, sequences: int) -> None:
        """Learns how many tokens a Verdict on a Draft gave."""
        rounds, newest = self._rounds[drafter], 1.0 / (TUNING.calibration_memory * sequences)
        rounds.tokens += newest * (tokens - rounds.tokens)
        rounds.expected_tokens += newest * (expected - rounds.expected_tokens)

    def observe_step(self, drafters: Collection[str]) -> None:
        """Learns which drafters have sequences in rounds at a step; empty: all sequences decode plainly."""
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
        """Returns the mean over the known drafters, for a drafter without rounds."""
        return _mean([*self._rounds.values()]) if self._rounds else _Rounds()


def _mean(rounds: Sequence[_Rounds]) -> _Rounds:
    return _Rounds(
        time=sum(each.time for each in rounds) / len(rounds),
        own=[sum(of_depth) / len(rounds) for of_depth in zip(*(each.own for each in rounds), strict=True)],
        tokens=sum(each.tokens for each in rounds) / len(rounds),
        expected_tokens=sum(each.expected_tokens for each in rounds) / len(rounds),
    )


def _ratio(seconds: float, expected_s: float, believed: float) -> float:
    """Returns measured / expected time, clipped to limits around its present estimate."""
    limit = TUNING.calibration_limit
    return min(max(seconds / expected_s, believed / limit), believed * limit)
