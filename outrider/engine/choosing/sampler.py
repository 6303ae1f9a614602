"""Chooses tokens for a whole step at once, and returns each piece of work its part."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, SparseProbs, Verdict
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import (
    GRAMMAR,
    TOKEN_ADJUSTMENTS,
    probabilities,
    process,
    scores,
)
from outrider.decoding.settings import TokenLogprobs
from outrider.decoding.verify import sample_draft_token, verify_coupled
from outrider.engine.choosing.asked_logprobs import LogprobRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.device_time import Mark, mark, wait_for
from outrider.engine.inputs.choice_input import ChoiceInput, DraftRows, PackedRows
from outrider.engine.sequence import NO_DRAFT

if TYPE_CHECKING:
    from outrider.engine.kernels.choice import DeviceChoice

ADJUSTED_AT_ONCE = 256  # rows of a GPU; torch's adjustments take float32 copies of this many
_HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True)
class Choices:
    """Choices from the logits of a piece of work."""

    rows: list[ChoiceContext]
    logits: torch.Tensor  # [num_rows, vocab_size]
    # [num_rows] best tokens of each row under the keyed noise, best first, at least one token
    top_tokens: list[tuple[int, ...]]
    # [num_rows, ranks] perturbed logits of these tokens, -inf for banned tokens
    perturbed: NDArray[np.float32]
    are_valid: list[bool]  # [num_rows] false if no token may come from the row: a number is not finite
    given_processed: torch.Tensor | None = None  # None: computed on first use
    # [num_tokens, num_layers, hidden_size] states at all fed tokens, the last of which are the rows
    hidden: torch.Tensor | None = None
    path: tuple[int, ...] = ()  # nodes of its Draft that the coupled rule accepts, root first
    told: tuple[TokenLogprobs, ...] = ()  # [num_rows] if they came with the tokens
    # Top tokens of further positions, up to an invalid position: each follows the best token before it.
    further: Sequence[tuple[int, ...]] = ()

    @cached_property
    def processed(self) -> torch.Tensor:
        """Logits after every sampling setting, float32 [num_rows, vocab_size]."""
        return process(self.logits, self.rows) if self.given_processed is None else self.given_processed

    @property
    def chosen(self) -> list[int]:
        """[num_rows] tokens that the coupled rule chooses."""
        return [best[0] for best in self.top_tokens]

    def limited(self, are_finite: list[bool]) -> "Choices":
        """Returns choices without tokens after a fed token whose keys and values are not finite.

        are_finite: [num_tokens] of all fed tokens; the rows belong to the last of these.
        """
        if all(are_finite):
            return self
        of_rows = are_finite[len(are_finite) - len(self.rows) :]
        return replace(self, are_valid=[*map(operator.and_, self.are_valid, of_rows)])

    def with_own_memory(self) -> "Choices":
        """Returns a copy that outlives the next replay of a graph."""
        hidden = None if self.hidden is None else self.hidden.clone()
        return replace(self, logits=self.logits.clone(), hidden=hidden)

    def verdict(self, count: int) -> Verdict:
        """Returns the Verdict of coupled verification on the leading ``count`` nodes of the Draft."""
        accepted = tuple(node for node in self.path if node < count)
        return Verdict(accepted, tuple(self.top_tokens[1 + node][0] for node in (ROOT, *accepted)))

    def target_probs(self) -> torch.Tensor:
        """Returns probabilities [num_rows, vocab_size]."""
        return probabilities(self.processed)

    def sample_draft_token(self, round: int, index: int = 0) -> tuple[int, SparseProbs]:
        """Returns a row's sampled token and its distribution, for verification other than coupled."""
        row = self.rows[index]
        return sample_draft_token(self.processed[index], row.noise_key, row.position, round)

    def logprobs(self, indices: Sequence[int], tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Returns log-probabilities of ``tokens``, chosen at the rows ``indices``; empty unless wanted."""
        sampling = self.rows[0].sampling
        if sampling.logprobs is None:
            return ()
        if self.told:
            return tuple(self.told[index] for index in indices)
        source = self.logits if sampling.logprobs_of == "raw" else self.processed
        return scores(source[[*indices]], tokens, sampling.logprobs)


@dataclass(frozen=True)
class Choosing:
    """Tokens that a device is choosing, on their way to the host."""

    rows: Sequence[list[ChoiceContext]]  # a list for each piece of work
    drafts: Sequence[Draft]  # a Draft for each piece of work
    logits: torch.Tensor  # [num_rows, vocab_size]
    processed: torch.Tensor | None  # float32 [num_rows, vocab_size] after every setting; None: not computed
    result: StepResult[torch.Tensor]  # result on the device
    # uint8 packed result on the host, complete once ``arrival`` is over. None: the host has the result.
    arriving: torch.Tensor | None
    arrival: Mark
    asked: LogprobRequest

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [num_rows * ranks] on the device."""
        return self.result.top_tokens.flatten()

    def wait(self) -> tuple[list[Choices], list[bool]]:
        """Waits for the device; returns what ``read`` does."""
        wait_for(self.arrival)
        return self.read()

    def read(self) -> tuple[list[Choices], list[bool]]:
        """Returns a Choices for each piece of work, and for each fed token whether its cache is finite.

        ``arrival`` must be over.
        """
        choices, start = list[Choices](), 0
        result = self.result.on_host() if self.arriving is None else self.result.unpacked(self.arriving)
        logprobs = self.asked.of_rows(result.logprobs)
        top_tokens, are_valid = [*map(tuple, result.top_tokens.tolist())], result.are_valid.tolist()
        are_accepted = result.are_accepted.tolist() or None
        for part, draft in zip(self.rows, self.drafts, strict=True):
            own = slice(start, start + len(part))
            best = (
                top_tokens[own]
                if self.result.top_tokens.shape[1] == 1
                else [*map(allowed_ones, part, top_tokens[own])]
            )
            processed = None if self.processed is None else self.processed[own]
            path = _path(draft, best, are_accepted[own] if are_accepted else None) if draft else ()
            numbers = best, result.perturbed[own], are_valid[own], processed
            of_part = tuple(logprobs[row] for row in range(start, own.stop) if row in logprobs)
            choices.append(Choices(part, self.logits[own], *numbers, path=path, told=of_part))
            start = own.stop
        return choices, result.are_finite.tolist()


def _path(
    draft: Draft, top_tokens: list[tuple[int, ...]], are_accepted: list[bool] | None
) -> tuple[int, ...]:
    """Returns the path of accepted nodes. are_accepted: [1 + nodes], if the device has found it."""
    if are_accepted is None:
        return verify_coupled(draft, [best[0] for best in top_tokens]).accepted
    return tuple(node for node in range(len(draft)) if are_accepted[1 + node])


def choose_tokens(
    logits: torch.Tensor,
    rows: Sequence[list[ChoiceContext]],
    are_finite: torch.Tensor,
    ranks: int = 1,
) -> tuple[list[Choices], list[bool]]:
    """Chooses tokens without log-probabilities and waits until the host knows them."""
    return _begin(logits, rows, are_finite, ranks, [NO_DRAFT] * len(rows), None, LogprobRequest([])).wait()


def begin_choosing(
    logits: torch.Tensor,
    rows: Sequence[list[ChoiceContext]],
    are_finite: torch.Tensor,
    ranks: int = 1,
    drafts: Sequence[Draft] | None = None,
    packed: PackedRows | None = None,
) -> Choosing:
    """Begins to choose tokens; on a GPU the host does not wait.

    Args:
        rows: contexts of each piece of work, in the order of ``logits`` [num_rows, vocab_size].
        are_finite: bool [num_tokens] of the pass, which reach the host with the result.
        ranks: tokens to be found for each row.
        drafts: Drafts to verify by the coupled rule. Such a piece of work has a row for the root and for each
            node. None: no Drafts.
        packed: input of the kernels about rows and Drafts, if it is on the device already.
    """
    asked = LogprobRequest([row for part in rows for row in part])
    return _begin(logits, rows, are_finite, ranks, drafts or [NO_DRAFT] * len(rows), packed, asked)


def _begin(
    logits: torch.Tensor,
    rows: Sequence[list[ChoiceContext]],
    are_finite: torch.Tensor,
    ranks: int,
    drafts: Sequence[Draft],
    packed: PackedRows | None,
    asked: LogprobRequest,
) -> Choosing:
    every = [row for part in rows for row in part]
    processed, nothing = None, are_finite.new_empty(0)
    are_valid, are_accepted, logprobs = nothing, nothing, logits.new_empty(0, dtype=torch.int32)
    best, perturbed = (logits.new_empty(0, ranks, dtype=dtype) for dtype in (torch.int32, torch.float32))
    if every:
        if _has_kernels(logits):
            if packed is None:
                of_drafts = DraftRows.of(drafts, [*map(len, rows)])
                packed = ChoiceInput.of_rows(every, of_drafts).copied(logits.device)
            choice = choose_adjusted(logits, every, packed, ranks)
            best, perturbed = choice.top_tokens, choice.perturbed
            are_valid, are_accepted = choice.are_valid, choice.are_accepted
        else:
            processed = process(logits, every)
            best, perturbed = gumbel_max(processed, every, ranks)
            are_valid = _are_valid(logits)
            if processed is not logits:
                are_valid &= _are_valid(processed)
        if asked.size:
            logprobs = asked.found(logits, processed, best[:, 0])
    result = StepResult(best.int(), perturbed, logprobs, are_valid, are_accepted, are_finite)
    arriving = result.packed().to("cpu", non_blocking=True) if logits.is_cuda else None  # in pinned memory
    arrival = mark(logits.device)
    return Choosing(rows, drafts, logits, processed, result, arriving, arrival, asked)


def allowed_ones(row: ChoiceContext, top_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the top tokens that the grammar allows, or at least the first token."""
    return top_tokens if row.num_allowed is None else top_tokens[: max(row.num_allowed, 1)]


def compile_kernels(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels that choose tokens on a GPU. dtype: type of the model's logits."""
    if device.type == "cuda" and _HAS_TRITON:
        from outrider.engine.kernels.choice import compile_choice

        compile_choice(vocab_size, dtype, device)


def _has_kernels(logits: torch.Tensor) -> bool:
    return logits.is_cuda and _HAS_TRITON


def choose_adjusted(
    logits: torch.Tensor, rows: list[ChoiceContext], packed: PackedRows, ranks: int
) -> "DeviceChoice":
    """Chooses tokens on a GPU after all settings, without a wait. Arguments: those of ``begin_choosing``."""
    from outrider.engine.kernels.choice import choose_on_device, joined

    others = [setting for setting in TOKEN_ADJUSTMENTS if setting is not GRAMMAR]
    adjusted = [row for row in rows if not row.needs_no_text]
    if not any(setting.applies(row) for setting in others for row in adjusted):
        return choose_on_device(logits, packed, ranks, _packed_masks(rows, logits))
    parts = []
    for first in range(0, len(rows), ADJUSTED_AT_ONCE):
        part = slice(first, first + ADJUSTED_AT_ONCE)
        adjusted_logits = process(logits[part], rows[part], TOKEN_ADJUSTMENTS)
        choice = choose_on_device(adjusted_logits, packed.without_drafts(part), ranks)
        parts.append(replace(choice, are_valid=choice.are_valid & _are_valid(logits[part])))
    return joined(parts, packed)


def _packed_masks(rows: list[ChoiceContext], logits: torch.Tensor) -> torch.Tensor | None:
    """Returns masks for the kernels, int32 [num_rows, ceil(vocab_size / 32)]; None: no row has a grammar."""
    if not any(GRAMMAR.applies(row) for row in rows):
        return None
    size = len(rows), -(-logits.shape[1] // 32)
    masks = torch.empty(size, dtype=torch.int32, pin_memory=logits.is_cuda)
    for mask, row in zip(masks.numpy(), rows, strict=True):
        mask[:] = -1 if row.mask is None else row.mask
    return masks.to(logits.device, non_blocking=True)


def _are_valid(logits: torch.Tensor) -> torch.Tensor:
    """Returns bool [num_rows]: whether the largest logit is a finite number.

    It is unless a logit is NaN or positive infinity, or all are negative infinity.
    """
    return logits.amax(dim=1).isfinite()
