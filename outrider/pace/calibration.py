"""How far rounds fall short of what they were expected to be, as far as plain decoding does not as well."""

from typing import Literal

Kind = Literal["rounds", "plain"]

MEMORY = 32.0  # times that each sequence in the batch observed it, after which an older one weighs 1/e
FADING = 400.0  # steps without one kind, after which the rest of what was seen of it is 1/e
LARGEST = 2.0  # factor by which one time may be off; beyond it counts as this


class Calibration:
    """Costs are those of steps, each by itself, and depths are the best by rates that are only estimates.

    What that leaves out is seen in the batch as it runs: a draft on the same machine slows down the target's
    steps, sequences come back too late for the step that was to take them, and where the best of several
    estimates is chosen it was mostly one that was too good. What slows both kinds down, such as prompts,
    cancels out. The kind that is not seen is taken to be more and more like the other one, so what did not
    pay once is tried again.
    """

    def __init__(self) -> None:
        self._times: dict[Kind, float] = {"rounds": 1.0, "plain": 1.0}  # taken / expected
        self._tokens = self._expected_tokens = 1.0  # of a round

    @property
    def of_rounds(self) -> float:
        """By what factor rounds take longer for their tokens than expected."""
        return self._times["rounds"] / self._times["plain"] * self._expected_tokens / self._tokens

    def observe(self, kind: Kind, seconds: float, expected_s: float, sequences: int) -> None:
        """From one answer of the target to a sequence to the next.

        sequences: that are in the batch, and tell the same.
        """
        factor = min(max(seconds / expected_s, 1.0 / LARGEST), LARGEST)
        self._times[kind] += (factor - self._times[kind]) / (MEMORY * sequences)

    def observe_tokens(self, tokens: float, expected: float, sequences: int) -> None:
        """Of a Verdict on a Draft."""
        newest = 1.0 / (MEMORY * sequences)
        self._tokens += newest * (tokens - self._tokens)
        self._expected_tokens += newest * (expected - self._expected_tokens)

    def unseen(self, kind: Kind) -> None:
        """A step without any of that kind."""
        other: Kind = "plain" if kind == "rounds" else "rounds"
        self._times[kind] += (self._times[other] - self._times[kind]) / FADING
        if kind == "rounds":
            self._tokens += (self._expected_tokens - self._tokens) / FADING
