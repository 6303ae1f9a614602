"""Step times, measured on an engine or computed from a data sheet."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.accelerators import Accelerator
from outrider.engine.planning.step_costs import StepCosts
from outrider.engine.work import Decode
from outrider.pace.step import StepSize
from workshop.advice.progress import Progress

PROMPT = tuple(range(10, 74))
GREEDY = Sampling(temperature=0, max_tokens=1500, ignore_eos=True)
LONGEST_S = 20.0  # seconds of measuring a model, after which no larger batch is started
FIRST_DRAFTED = 5  # first drafted token id; the ids have no influence on the times


class StepTimes(Protocol):
    """Step times of one model."""

    def seconds(self, sequences: float, tokens: float) -> float:
        """Returns the seconds of a step. tokens: sum over all sequences."""


class Steps:
    """Runs steps of one shape over one set of sequences."""

    def __init__(
        self,
        engine: Engine,
        sequences: int,
        tokens: int,
        *,
        branches: bool = False,
        sampling: Sampling = GREEDY,
        prompt: Sequence[int] = PROMPT,
    ) -> None:
        """Opens the sequences.

        Args:
            tokens: tokens per sequence: one committed token, then a chain of drafted tokens.
            branches: the drafted tokens are siblings instead of a chain.
        """
        self._engine = engine
        self._round = 0
        drafted = range(FIRST_DRAFTED, FIRST_DRAFTED + tokens - 1)
        self._draft = Draft((*drafted,), (ROOT,) * len(drafted)) if branches else Draft.chain(drafted)
        self._sequences = [engine.open(len(prompt), number, sampling) for number in range(sequences)]
        self.take(tuple(prompt))

    def take(self, tokens: tuple[int, ...] = ()) -> float:
        """Runs one round and returns the seconds of its last step. The first round includes the prefill."""
        self._round += 1
        for sequence in self._sequences:
            self._engine.submit(
                Decode(sequence.number, len(sequence.tokens), tokens, self._draft, self._round)
            )
        while self._engine.has_work:
            self._engine.step()
        assert self._engine.last_step is not None
        return self._engine.last_step.total

    def close(self) -> None:
        """Frees the sequences."""
        for sequence in self._sequences:
            self._engine.close(sequence)


@dataclass(frozen=True)
class MeasuredSteps:
    """Step times, linearly interpolated between measured sizes."""

    taken: Mapping[int, Mapping[int, float]]  # seconds by number of sequences, then by sum of tokens

    def seconds(self, sequences: float, tokens: float) -> float:
        """Returns seconds at the nearest measured number of sequences, scaled up if that is smaller."""
        nearest = min(self.taken, key=lambda measured: abs(np.log(measured / sequences)))
        of_sequences = self.taken[nearest]
        sizes = sorted(of_sequences)
        each, scale = [of_sequences[size] for size in sizes], max(sequences / nearest, 1.0)
        return scale * float(np.interp(tokens / scale, sizes, each))

    def faster(self, times: float) -> "MeasuredSteps":
        """Returns the times divided by a factor."""
        return MeasuredSteps(
            {count: {tokens: s / times for tokens, s in of.items()} for count, of in self.taken.items()}
        )


@dataclass(frozen=True)
class DataSheetSteps:
    """Step times from the data sheet of an accelerator."""

    costs: StepCosts
    accelerator: Accelerator
    context: float  # context tokens per sequence

    def seconds(self, sequences: float, tokens: float) -> float:
        """Returns the seconds of a step. A step of plain decoding is launched during the previous step."""
        size = StepSize(sequences, tokens, context_tokens=sequences * self.context)
        return self.costs.seconds(self.accelerator, size, is_early=tokens == sequences)


def measured_steps(
    engine: Engine,
    batches: Sequence[int],
    sizes: Sequence[int],
    prompt: Sequence[int],
    repetitions: int,
    progress: Progress,
) -> MeasuredSteps:
    """Measures steps and returns their median times.

    Args:
        batches: numbers of sequences, the smallest first. Numbers that do not fit into the cache are left
            out, and larger numbers after smaller numbers have taken too long.
        sizes: tokens per sequence.
        prompt: context of each sequence.

    Raises:
        HopelessError: the time limit of ``progress`` is over.
    """
    started = time.monotonic()
    taken: dict[int, dict[int, float]] = {}
    for sequences in batches:
        if taken and not _has_room(engine, sequences, len(prompt) + (repetitions + 1) * max(sizes) + 1):
            break
        if time.monotonic() - started > LONGEST_S:
            progress.tell(
                f"steps of {sequences} sequences and more are not measured: they take too long here"
            )
            break
        of_sequences = taken[sequences] = {}
        for tokens in sizes:
            progress.at(len(taken) - 1, len(batches), "numbers of sequences measured")
            steps = Steps(engine, sequences, tokens, prompt=prompt)
            steps.take()  # warms up
            of_sequences[sequences * tokens] = statistics.median(steps.take() for _ in range(repetitions))
            steps.close()
    return MeasuredSteps(taken)


def _has_room(engine: Engine, sequences: int, length: int) -> bool:
    """Whether the cache has room for this number of sequences of this length."""
    blocks = sequences * -(-length // engine.settings.block_size)
    return blocks <= engine.load().total_blocks and sequences <= engine.settings.max_sequences
