"""Log-probabilities that reach the host in the same copy as a step's tokens."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.sampling import SCORED_AT_ONCE, log_probabilities, process, told_logprobs
from outrider.decoding.settings import Sampling, TokenLogprobs
from outrider.engine.choosing.choosing_rows import ChoosingRows


class LogprobRequest:
    """Request for log-probabilities of some rows of a step, under coupled verification."""

    def __init__(self, rows: ChoosingRows) -> None:
        self._asking = {
            rows.starts[place] + index: row
            for place, part in rows.special.items()
            for index, row in enumerate(part)
            if row.sampling.logprobs is not None and row.sampling.verification == "coupled"
        }
        asking = self._asking.items()
        self._raw = [index for index, row in asking if row.sampling.logprobs_of == "raw"]
        self._processed = [index for index, row in asking if row.sampling.logprobs_of == "processed"]
        self._most = max((row.sampling.logprobs or 0 for _, row in asking), default=0)
        self.size = len(asking) * (1 + 2 * self._most)  # number of integers of the result

    def found(self, logits: Tensor, processed: Tensor | None, chosen: Tensor) -> Tensor:
        """Returns the log-probabilities as ``of_rows`` reads them: int32 [size].

        Args:
            logits: [num_rows, vocab_size] before any sampling setting.
            processed: logits after the settings; None: not computed yet.
            chosen: integers [num_rows], chosen token of each row.
        """
        numbers = []
        for source, tokens in self._sources(logits, processed, chosen):
            of_chosen, ids, likeliest = log_probabilities(source, tokens.long(), self._most)
            as_bits = of_chosen[:, None].view(torch.int32), ids.int(), likeliest.view(torch.int32)
            numbers.append(torch.cat(as_bits, dim=1).flatten())
        return torch.cat(numbers)

    def _sources(
        self, logits: Tensor, processed: Tensor | None, chosen: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields logits and chosen tokens of the rows that ask, few processed rows at a time."""
        if self._raw:
            yield _at(logits, self._raw), _at(chosen, self._raw)
        for first in range(0, len(self._processed), SCORED_AT_ONCE):
            indices = self._processed[first : first + SCORED_AT_ONCE]
            if processed is None:
                source = process(_at(logits, indices), [self._asking[index] for index in indices])
            else:
                source = _at(processed, indices)
            yield source, _at(chosen, indices)

    def of_rows(self, numbers: NDArray[np.int32]) -> dict[int, TokenLogprobs]:
        """Returns the log-probabilities of each row that asks. numbers: result of ``found``."""
        bits = numbers.reshape(-1, 1 + 2 * self._most)
        values, told = bits.view(np.float32), {}
        for place, index in enumerate((*self._raw, *self._processed)):
            end = 1 + (self._asking[index].sampling.logprobs or 0)
            ids, likeliest = bits[place, 1:end], values[place, self._most + 1 : self._most + end]
            told[index] = told_logprobs(float(values[place, 0]), ids.tolist(), likeliest.tolist())
        return told


def comes_along(sampling: Sampling) -> bool:
    """Whether the device alone can compute all log-probabilities that the settings ask for."""
    return sampling.logprobs is None or (sampling.verification == "coupled" and sampling.logprobs_of == "raw")


def _at(values: Tensor, indices: list[int]) -> Tensor:
    """Returns the rows at ascending indices, without a copy of the indices to the device."""
    gaps = [place for place, (before, after) in enumerate(pairwise(indices), 1) if after > before + 1]
    bounds = pairwise([0, *gaps, len(indices)])
    runs = [values[indices[start] : indices[end - 1] + 1] for start, end in bounds]
    return runs[0] if len(runs) == 1 else torch.cat(runs)
