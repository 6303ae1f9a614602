"""Input of the kernels that choose tokens, in addition to the logits.

It is copied to the device in the step's buffer. It is made from the feeds alone. The contexts of the rows,
which hold far more, are made while the device computes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.inputs.step_buffer import Field, StepBuffer
from outrider.engine.inputs.step_input import Feed, Numbers
from outrider.engine.row_settings import HAS_NOISE, LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P, row_settings
from outrider.engine.sequence import EngineSequence

CHUNK = 4096  # tokens of a row that a program reads
BLOCK = 64  # tokens that are represented by their largest logit in the bound of top-k
CAPACITY = 16384  # candidates of a row that are gathered; a row with more is read again
_NO_ROW = -(2**40)  # far below every row
# Integers of a row. ``positions`` is the number of positions that are chosen in succession, each after the
# best token of the position before.
INTEGERS = ("noise_key", "position", "top_k", "has_noise", "positions")


@dataclass(frozen=True)
class PackedRows:
    """Input of the kernels for each row, on the device."""

    integers: Tensor  # int64 [5, num_rows] INTEGERS
    numbers: Tensor  # float64 [3, num_rows] temperature, top_p, the logarithm of min_p
    drafts: Tensor  # int64 [2, num_rows] DraftRows.numbers, [0, num_rows]: nothing was drafted
    depth: int  # DraftRows.depth; 0: nothing was drafted
    are_truncated: bool  # whether any row has top_k, top_p or min_p

    def without_drafts(self, part: slice) -> "PackedRows":
        """Returns a copy of consecutive rows, as if nothing was drafted."""
        integers, numbers = self.integers[:, part].contiguous(), self.numbers[:, part].contiguous()
        return PackedRows(integers, numbers, self.drafts[:0], 0, self.are_truncated)


@dataclass(frozen=True)
class DraftRows:
    """Rows of a step's logits that belong to nodes of Drafts."""

    numbers: Numbers  # [2, num_rows] row of the parent, below 0: none; drafted token
    depth: int  # nodes of the longest path

    @classmethod
    def of(cls, drafts: Sequence[Draft], counts: Sequence[int]) -> "DraftRows | None":
        """Returns the rows of Drafts; None: nothing was drafted.

        counts: rows of each piece of work; with a Draft a row for the root, then a row for each node.
        """
        depth = max([draft.depth for draft in drafts if draft.tokens], default=0)
        if not depth:
            return None
        pairs = [*zip(drafts, counts, strict=True)]
        parents = [
            (_NO_ROW, *draft.parents) if draft.tokens else (_NO_ROW,) * count for draft, count in pairs
        ]
        tokens = [(0, *draft.tokens) if draft.tokens else (0,) * count for draft, count in pairs]
        numbers = np.empty((2, sum(counts)), np.int64)
        roots = np.cumsum(counts) - counts
        numbers[0] = np.fromiter(chain.from_iterable(parents), np.int64) + (roots + 1).repeat(counts)
        numbers[1] = np.fromiter(chain.from_iterable(tokens), np.int64)
        return cls(numbers, depth)


@dataclass(frozen=True)
class ChoiceInput:
    """PackedRows on the host: fields of a step's buffer."""

    integers: Numbers  # [5, num_rows] field of PackedRows
    numbers: NDArray[np.float64]  # [3, num_rows] field of PackedRows
    drafts: Numbers  # DraftRows.numbers [2, num_rows]; [0, num_rows]: nothing was drafted
    depth: int
    are_truncated: bool

    @classmethod
    def of_feeds(
        cls,
        feeds: Sequence[Feed],
        sequences: Sequence[EngineSequence],
        counts: Sequence[int],
        drafts: Sequence[Draft],
        positions: Sequence[int] = (),
    ) -> "ChoiceInput":
        """Makes the input of choices after the last ``counts`` tokens of each feed.

        Args:
            drafts: argument of begin_choosing.
            positions: number of positions to be chosen from each row on; empty: one each.
        """
        keys = np.array([sequence.noise_key for sequence in sequences], np.uint64)
        settings = np.concatenate([sequence.row_settings for sequence in sequences])
        of_drafts = DraftRows.of(drafts, counts)
        origins = np.array([sequence.noise_origin for sequence in sequences], np.int64)
        places = _positions(feeds, counts) - origins.repeat(counts)
        return cls._of(keys, settings, counts, places, of_drafts, positions)

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[ChoiceContext],
        drafts: DraftRows | None = None,
        positions: Sequence[int] = (),
    ) -> "ChoiceInput":
        """Makes the input of rows that are known already. positions: argument of ``of_feeds``."""
        keys = np.array([row.noise_key for row in rows], np.uint64)
        settings = np.concatenate([row_settings(row.sampling) for row in rows])
        places = np.array([row.position for row in rows], np.int64)
        return cls._of(keys, settings, [1] * len(rows), places, drafts, positions)

    @classmethod
    def without_choice(cls, positions: Sequence[int]) -> "ChoiceInput":
        """Makes the input of rows for which another rank chooses, or of padding. positions: [num_rows]."""
        row = ChoiceContext(Sampling(temperature=0.0), 0, 0, (), ())
        return cls.of_rows([row] * len(positions), positions=positions)

    @classmethod
    def _of(
        cls,
        keys: NDArray[np.uint64],
        settings: NDArray[np.float64],
        counts: Sequence[int],
        places: Numbers,
        drafts: DraftRows | None,
        positions: Sequence[int],
    ) -> "ChoiceInput":
        """
        Args:
            keys, settings: noise keys [num_texts], and the concatenated row_settings of the texts.
            counts: rows of each text.
            places: [num_rows] position of each row's noise.
        """
        integers = np.empty((len(INTEGERS), len(places)), np.int64)
        integers[0] = keys.view(np.int64).repeat(counts)  # keeps the bits of a key
        integers[1], integers[4] = places, [*positions] or 1
        of_texts = settings.reshape(len(keys), -1)
        of_rows = of_texts.repeat(counts, axis=0).T
        integers[2:4] = of_rows[[TOP_K, HAS_NOISE]]
        nodes = np.empty((0, len(places)), np.int64) if drafts is None else drafts.numbers
        top_k, _, _, top_p, distance = of_texts.T
        are_truncated = (top_k > 0) | (top_p < 1.0) | (distance > -math.inf)
        depth = 0 if drafts is None else drafts.depth
        return cls(
            integers, of_rows[[TEMPERATURE, TOP_P, LOG_MIN_P]], nodes, depth, bool(are_truncated.any())
        )

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of this input in a step's buffer."""
        return fields_of_choice(self.integers.shape[1], len(self.drafts))

    def write(self, buffer: StepBuffer) -> None:
        """Writes its fields into a step's buffer."""
        for name in self.fields:
            buffer.arrays[name][:] = getattr(self, name)

    def at(self, given: Mapping[str, Tensor]) -> PackedRows:
        """Returns the input of the kernels. given: fields of the step's buffer, on the device."""
        return PackedRows(
            given["integers"], given["numbers"], given["drafts"], self.depth, self.are_truncated
        )

    def copied(self, device: torch.device) -> PackedRows:
        """Copies the fields to the device without a step's buffer and without waiting."""
        buffer = StepBuffer(self.fields, device)
        self.write(buffer)
        return self.at(buffer.sent())


def fields_of_choice(rows: int, draft_numbers: int = 2) -> dict[str, Field]:
    """Returns the fields of ChoiceInput. draft_numbers: 2, or 0 if nothing was drafted."""
    return {
        "integers": Field((len(INTEGERS), rows)),
        "numbers": Field((3, rows), "float64"),
        "drafts": Field((draft_numbers, rows)),
    }


def bytes_to_choose(num_rows: int, vocab_size: int) -> int:
    """Returns the bytes of memory that the kernels need to find the candidates of all rows."""
    chunks = -(-vocab_size // CHUNK)
    candidates, block_maxima, statistics = 8 * CAPACITY, 8 * chunks * CHUNK // BLOCK, 3 * 4 * chunks
    return num_rows * (candidates + block_maxima + statistics)


def _positions(feeds: Sequence[Feed], counts: Sequence[int]) -> Numbers:
    """Returns int64 [num_rows]: positions of the tokens after the last ``counts`` of each feed."""
    stops = np.cumsum(counts)
    ends = np.array([feed.start + len(feed.tokens) for feed in feeds], np.int64)
    positions: Numbers = np.arange(sum(counts)) + (ends + 1 - stops).repeat(counts)
    for place, (feed, count) in enumerate(zip(feeds, counts, strict=True)):
        if feed.tree is not None and count:
            nodes, stop = min(count, len(feed.tree)), int(stops[place])
            root = feed.start + len(feed.tokens) - len(feed.tree)
            positions[stop - nodes : stop] = root + 1 + np.array(feed.tree.depths[-nodes:])
    return positions
