"""By how much rounds miss the speed that costs predict, beside how much plain decoding misses its own."""

from typing import Literal

Kind = Literal["rounds", "plain"]

MEMORY = 32.0  # times that each sequence in the batch observed it, after which an older one weighs 1/e
FADING = 400.0  # steps without one kind, after which the rest of what was seen of it is 1/e
LARGEST = 2.0  # factor by which one time may be off; beyond it counts as this


class Calibration:
    """Compares the time that rounds and plain decoding take with the time that was expected.

    Costs describe steps one by one, and depths are chosen by estimated rates. Both leave something out that
    only the running batch shows. A draft on the same machine slows the target's steps down. Sequences come
    back too late for the step that was to take them. And the best of several estimates is mostly one that was
    too good. What slows both kinds down, such as prompts, cancels out. A kind that is not seen for a while is
    taken to be more and more like the other one, so what did not pay once is tried again.
    """

    def __init__(self) -> None:
        self._times: dict[Kind, float] = {"rounds": 1.0, "plain": 1.0}  # taken / expected
        self._tokens = self._expected_tokens = 1.0  # of a round

    @property
    def of_rounds(self) -> float:
        """Factor by which rounds take longer for their tokens than expected."""
        return self._times["rounds"] / self._times["plain"] * self._expected_tokens / self._tokens

    def observe(self, kind: Kind, seconds: float, expected_s: float, sequences: int) -> None:
        """A sequence waited so long from one answer of the target to the next.

        sequences: the number of them in the batch; each observes the same.
        """
        factor = min(max(seconds / expected_s, 1.0 / LARGEST), LARGEST)
        self._times[kind] += (factor - self._times[kind]) / (MEMORY * sequences)

    def observe_tokens(self, tokens: float, expected: float, sequences: int) -> None:
        """A Verdict on a Draft gave so many tokens."""
        newest = 1.0 / (MEMORY * sequences)
        self._tokens += newest * (tokens - self._tokens)
        self._expected_tokens += newest * (expected - self._expected_tokens)

    def unseen(self, kind: Kind) -> None:
        """A step without any of that kind."""
        other: Kind = "plain" if kind == "rounds" else "rounds"
        self._times[kind] += (self._times[other] - self._times[kind]) / FADING
        if kind == "rounds":
            self._tokens += (self._expected_tokens - self._tokens) / FADING
