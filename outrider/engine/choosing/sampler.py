"""Choice of tokens for a whole step at once, divided into the pieces of work."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct, structs
from numpy.typing import NDArray

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft, SparseProbs, Verdict
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
from outrider.engine.choosing.choosing_rows import ChoosingRows
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.device_time import Mark, mark, wait_for
from outrider.engine.inputs.choice_input import ChoiceInput, DraftRows, PackedRows
from outrider.engine.sequence import NO_DRAFT

if TYPE_CHECKING:
    from outrider.engine.kernels.choice import DeviceChoice

ADJUSTED_AT_ONCE = 256  # rows on a GPU, of which torch's adjustments make float32 copies at a time
_HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True)
class RowNumbers:
    """Logits of all rows of a step, and numbers derived from these."""

    logits: torch.Tensor  # [num_rows, vocab_size]
    # float32 [num_rows, ranks] perturbed logits of the best tokens, -inf for banned tokens
    perturbed: NDArray[np.float32]
    are_all_valid: bool  # whether a token may come from each row
    processed: torch.Tensor | None = None  # float32 [num_rows, vocab_size]; None: not computed
    experts_read: int = 0  # experts that the step read in all layers together; 0: not counted


class Choices(Struct, frozen=True, eq=False, dict=True):
    """Choices from the logits of a piece of work."""

    numbers: RowNumbers
    rows: slice  # its rows among the rows of the step
    chosen: list[int]  # [num_rows] best tokens under the keyed noise
    are_valid: list[bool]  # [num_rows] false: a number is not finite, so no token may come from the row
    contexts: Sequence[ChoiceContext] = ()  # [num_rows]; empty: no setting needs more than noise
    given_top_tokens: list[tuple[int, ...]] | None = None  # None: the chosen tokens alone
    # [num_tokens, num_layers, hidden_size] states at all fed tokens, the last of which are the rows
    hidden: torch.Tensor | None = None
    path: tuple[int, ...] = ()  # nodes of its Draft that coupled verification accepts, root first
    told: tuple[TokenLogprobs, ...] = ()  # [num_rows] if they were copied with the tokens
    # Top tokens of further positions, up to an invalid position: each follows the best token before it.
    further: Sequence[tuple[int, ...]] = ()
    has_moved: bool = False  # whether the device has moved the cache of ``path`` after the committed tokens

    @property
    def logits(self) -> torch.Tensor:
        """Logits before any sampling setting, [num_rows, vocab_size]."""
        return self.numbers.logits[self.rows]

    @property
    def perturbed(self) -> NDArray[np.float32]:
        """Perturbed logits of ``top_tokens``, float32 [num_rows, ranks]."""
        return self.numbers.perturbed[self.rows]

    @property
    def top_tokens(self) -> list[tuple[int, ...]]:
        """Best tokens of each row under the keyed noise, best first, at least one token: [num_rows]."""
        return [(token,) for token in self.chosen] if self.given_top_tokens is None else self.given_top_tokens

    @cached_property
    def processed(self) -> torch.Tensor:
        """Logits after every sampling setting, float32 [num_rows, vocab_size]."""
        processed = self.numbers.processed
        return process(self.logits, self.contexts) if processed is None else processed[self.rows]

    def limited(self, are_finite: list[bool]) -> "Choices":
        """Returns choices without tokens after a fed token whose keys and values are not finite.

        are_finite: [num_tokens] of all fed tokens; the rows belong to the last of these.
        """
        if all(are_finite):
            return self
        of_rows = are_finite[len(are_finite) - len(self.are_valid) :]
        return structs.replace(self, are_valid=[*map(operator.and_, self.are_valid, of_rows)])

    def with_own_memory(self) -> "Choices":
        """Returns a copy that outlives the next replay of a graph."""
        hidden = None if self.hidden is None else self.hidden.clone()
        processed = None if self.numbers.processed is None else self.numbers.processed[self.rows]
        numbers = RowNumbers(self.logits.clone(), self.perturbed, all(self.are_valid), processed)
        return structs.replace(self, numbers=numbers, rows=slice(None), hidden=hidden)

    def verdict(self, count: int) -> Verdict:
        """Returns the Verdict of coupled verification on the leading ``count`` nodes of the Draft."""
        accepted, chosen = self.path, self.chosen
        if accepted and accepted[-1] >= count:
            accepted = tuple(node for node in accepted if node < count)
        if not accepted or accepted[-1] == len(accepted) - 1:  # the accepted nodes come first
            return Verdict(accepted, tuple(chosen[: 1 + len(accepted)]))
        return Verdict(accepted, (chosen[0], *[chosen[1 + node] for node in accepted]))

    def target_probs(self) -> torch.Tensor:
        """Returns probabilities [num_rows, vocab_size]."""
        return probabilities(self.processed)

    def sample_draft_token(self, round: int, index: int = 0) -> tuple[int, SparseProbs]:
        """Returns a row's sampled token and its distribution, for verification other than coupled."""
        row = self.contexts[index]
        return sample_draft_token(self.processed[index], row.noise_key, row.position, round)

    def logprobs(self, verdict: Verdict) -> tuple[TokenLogprobs, ...]:
        """Returns log-probabilities of the Verdict's tokens; empty unless they are asked for.

        Requires ``contexts``.
        """
        sampling, rows = self.contexts[0].sampling, [0, *(1 + node for node in verdict.accepted)]
        if sampling.logprobs is None:
            return ()
        if self.told:
            return tuple(self.told[row] for row in rows)
        source = self.logits if sampling.logprobs_of == "raw" else self.processed
        return scores(source[rows], verdict.tokens, sampling.logprobs)


@dataclass(frozen=True)
class Choosing:
    """Tokens that a device is choosing, and their copy to the host."""

    rows: ChoosingRows
    drafts: Sequence[Draft]  # a Draft for each piece of work
    logits: torch.Tensor  # [num_rows, vocab_size]
    processed: torch.Tensor | None  # float32 [num_rows, vocab_size] after every setting; None: not computed
    result: StepResult[torch.Tensor]  # result on the device
    # uint8 packed result on the host, complete once ``arrival`` has passed. None: the host has the result.
    arriving: torch.Tensor | None
    arrival: Mark
    asked: LogprobRequest

    @property
    def tokens(self) -> torch.Tensor:
        """Chosen tokens on the device: int32 [num_rows * ranks]."""
        return self.result.top_tokens.flatten()

    def wait(self) -> tuple[list[Choices], list[bool]]:
        """Waits for the device; returns what ``read`` does."""
        wait_for(self.arrival)
        return self.read()

    def read(self) -> tuple[list[Choices], list[bool]]:
        """Returns a Choices for each piece of work, and for each fed token whether its cache is finite.

        ``arrival`` must have passed.
        """
        result = self.result.on_host() if self.arriving is None else self.result.unpacked(self.arriving)
        are_all_valid, experts_read = bool(result.are_valid.all()), int(result.experts_read.sum())
        numbers = RowNumbers(self.logits, result.perturbed, are_all_valid, self.processed, experts_read)
        chosen, are_valid = result.top_tokens[:, 0].tolist(), result.are_valid.tolist()
        paths, starts = self._paths(chosen, result.are_accepted), self.rows.starts
        has_more = result.top_tokens.shape[1] > 1
        top_tokens = [*map(tuple, result.top_tokens.tolist())] if has_more else None
        choices = [
            Choices(
                numbers,
                slice(first, end),
                chosen[first:end],
                are_valid[first:end],
                given_top_tokens=top_tokens and top_tokens[first:end],
                path=path,
            )
            for first, end, path in zip(starts, starts[1:], paths, strict=False)
        ]
        logprobs = self.asked.of_rows(result.logprobs)
        for place, contexts in self.rows.special.items():
            choice, rows = choices[place], range(starts[place], starts[place + 1])
            told = tuple(logprobs[row] for row in rows if row in logprobs)
            best = choice.given_top_tokens and [*map(allowed_ones, contexts, choice.given_top_tokens)]
            choices[place] = structs.replace(choice, contexts=contexts, told=told, given_top_tokens=best)
        return choices, result.are_finite.tolist()

    def _paths(self, chosen: list[int], are_accepted: NDArray[np.bool_]) -> list[tuple[int, ...]]:
        """Returns the accepted path of each Draft, which the host computes if the device did not."""
        starts = self.rows.starts
        if not len(are_accepted):
            pairs = zip(self.drafts, starts, strict=False)
            return [
                verify_coupled(draft, chosen[first : first + 1 + len(draft)]).accepted if draft.tokens else ()
                for draft, first in pairs
            ]
        accepted = are_accepted.tolist()
        return [
            tuple(compress(range(end - first - 1), accepted[first + 1 : end])) if draft.tokens else ()
            for draft, first, end in zip(self.drafts, starts, starts[1:], strict=False)
        ]


def choose_tokens(
    logits: torch.Tensor,
    rows: Sequence[list[ChoiceContext]],
    are_finite: torch.Tensor,
    ranks: int = 1,
) -> tuple[list[Choices], list[bool]]:
    """Chooses tokens without log-probabilities and waits until the host knows them.

    rows: contexts of the rows of each piece of work.
    """
    nothing = [NO_DRAFT] * len(rows)
    asked = LogprobRequest(ChoosingRows.of([]))
    return _begin(logits, ChoosingRows.of(rows), are_finite, ranks, nothing, None, asked).wait()


def begin_choosing(
    logits: torch.Tensor,
    rows: ChoosingRows,
    are_finite: torch.Tensor,
    ranks: int = 1,
    drafts: Sequence[Draft] | None = None,
    packed: PackedRows | None = None,
    experts_read: torch.Tensor | None = None,
) -> Choosing:
    """Begins to choose tokens; on a GPU the host does not wait.

    Args:
        logits: [num_rows, vocab_size], in the order of the rows.
        are_finite: bool [num_tokens] of the pass, which reach the host with the result.
        ranks: number of best tokens to find for each row.
        drafts: Drafts for coupled verification. Such a piece of work has a row for the root and for each
            node. None: no Drafts.
        packed: input of the kernels about rows and Drafts, if it is on the device already.
        experts_read: ForwardOutput.experts_read of the pass, which reaches the host with the result too.
    """
    nothing = [NO_DRAFT] * len(rows.counts)
    asked = LogprobRequest(rows)
    return _begin(logits, rows, are_finite, ranks, drafts or nothing, packed, asked, experts_read)


def _begin(
    logits: torch.Tensor,
    rows: ChoosingRows,
    are_finite: torch.Tensor,
    ranks: int,
    drafts: Sequence[Draft],
    packed: PackedRows | None,
    asked: LogprobRequest,
    experts_read: torch.Tensor | None = None,
) -> Choosing:
    processed, nothing = None, logits.new_empty(0, dtype=torch.int32)
    if not any(rows.counts):
        best, perturbed = nothing.view(0, ranks), logits.new_empty(0, ranks, dtype=torch.float32)
        are_valid = are_accepted = are_finite[:0]
    elif _has_kernels(logits):
        if packed is None:
            of_drafts = DraftRows.of(drafts, rows.counts)
            packed = ChoiceInput.of_rows(rows.every, of_drafts).copied(logits.device)
        choice = choose_adjusted(logits, rows, packed, ranks)
        best, perturbed = choice.top_tokens, choice.perturbed
        are_valid, are_accepted = choice.are_valid, choice.are_accepted
    else:
        processed = process(logits, rows.every)
        token_ids, perturbed = gumbel_max(processed, rows.every, ranks)
        best, are_valid, are_accepted = token_ids.int(), _are_valid(logits), are_finite[:0]
        if processed is not logits:
            are_valid &= _are_valid(processed)
    logprobs = asked.found(logits, processed, best[:, 0]) if asked.size else nothing
    read = nothing if experts_read is None else experts_read
    result = StepResult(best, perturbed, logprobs, read, are_valid, are_accepted, are_finite)
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
    logits: torch.Tensor, rows: ChoosingRows, packed: PackedRows, ranks: int
) -> "DeviceChoice":
    """Chooses tokens on a GPU under all settings, without a wait. Arguments: as for ``begin_choosing``."""
    from outrider.engine.kernels.choice import choose_on_device, joined

    others = [setting for setting in TOKEN_ADJUSTMENTS if setting is not GRAMMAR]
    adjusted = [row for part in rows.special.values() for row in part if not row.needs_no_text]
    if not any(setting.applies(row) for setting in others for row in adjusted):
        return choose_on_device(logits, packed, ranks, _packed_masks(rows, logits))
    parts = []
    for first in range(0, len(rows.every), ADJUSTED_AT_ONCE):
        part = slice(first, first + ADJUSTED_AT_ONCE)
        adjusted_logits = process(logits[part], rows.every[part], TOKEN_ADJUSTMENTS)
        choice = choose_on_device(adjusted_logits, packed.without_drafts(part), ranks)
        parts.append(replace(choice, are_valid=choice.are_valid & _are_valid(logits[part])))
    return joined(parts, packed)


def _packed_masks(rows: ChoosingRows, logits: torch.Tensor) -> torch.Tensor | None:
    """Returns masks for the kernels, int32 [num_rows, ceil(vocab_size / 32)]; None: no row has a grammar."""
    if not any(GRAMMAR.applies(row) for part in rows.special.values() for row in part):
        return None
    size = rows.starts[-1], -(-logits.shape[1] // 32)
    masks = torch.full(size, -1, dtype=torch.int32, pin_memory=logits.is_cuda)
    for place, part in rows.special.items():
        for mask, row in zip(masks.numpy()[rows.starts[place] :], part, strict=False):
            if row.mask is not None:
                mask[:] = row.mask
    return masks.to(logits.device, non_blocking=True)


def _are_valid(logits: torch.Tensor) -> torch.Tensor:
    """Returns bool [num_rows]: whether the largest logit is a finite number.

    It is not finite if a logit is NaN or positive infinity, or if all logits are negative infinity.
    """
    return logits.amax(dim=1).isfinite()
