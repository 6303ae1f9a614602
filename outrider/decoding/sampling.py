"""Sampling: every setting at every position, then the choice of tokens with keyed noise.

Rows are independent: a row's result does not depend on the other rows of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decoding import penalties as adjustments
from outrider.decoding import truncation
from outrider.decoding.choice_context import ChoiceContext, to_device
from outrider.decoding.gumbel_max import best, gumbel_max
from outrider.decoding.penalties import BANNED
from outrider.decoding.settings import Sampling, TokenLogprobs

SCORED_AT_ONCE = 64  # rows that are scored together; scoring makes a float32 copy of them


@dataclass(frozen=True)
class Setting:
    """Sampling setting, or several settings that are applied together."""

    applies: Callable[[ChoiceContext], bool]
    # Modifies float32 [num_rows, vocab_size] in place; gets only the rows that the setting applies to.
    apply: Callable[[Tensor, Sequence[ChoiceContext]], None]
    reads_text: bool = False  # depends on the preceding tokens, not only on their number


def _divide_by_temperature(logits: Tensor, rows: Sequence[ChoiceContext]) -> None:
    logits /= torch.tensor([[row.sampling.temperature] for row in rows], device=logits.device)


TEMPERATURE = Setting(lambda row: row.sampling.temperature not in (0.0, 1.0), _divide_by_temperature)
GRAMMAR = Setting(lambda row: row.mask is not None, adjustments.ban_refused, reads_text=True)

# Settings that change or ban single tokens, in the order in which they apply.
TOKEN_ADJUSTMENTS: tuple[Setting, ...] = (
    Setting(lambda row: bool(row.sampling.logit_bias), adjustments.add_bias),
    Setting(
        lambda row: row.sampling.repetition_penalty != 1.0, adjustments.penalize_repetition, reads_text=True
    ),
    Setting(
        lambda row: row.sampling.presence_penalty != 0.0 or row.sampling.frequency_penalty != 0.0,
        adjustments.penalize_output,
        reads_text=True,
    ),
    Setting(lambda row: row.sampling.allowed_token_ids is not None, adjustments.ban_all_but_allowed),
    Setting(lambda row: bool(row.sampling.bad_token_ids), adjustments.ban_bad),
    Setting(lambda row: len(row.generated) + len(row.path) < row.sampling.min_tokens, adjustments.ban_ends),
    GRAMMAR,
    Setting(lambda row: row.may_be_stuck, adjustments.leave_an_end),
)

# Greedy rows skip settings that cannot change the likeliest token. So processed log-probabilities and
# alternatives are still those of the model.
_WHOLE_ROWS: tuple[Setting, ...] = (
    Setting(lambda row: row.is_greedy and row.sampling.verification != "coupled", truncation.keep_likeliest),
    TEMPERATURE,
    Setting(lambda row: row.sampling.top_k > 0 and not row.is_greedy, truncation.keep_top_k),
    Setting(lambda row: row.sampling.top_p < 1.0 and not row.is_greedy, truncation.keep_top_p),
    Setting(lambda row: row.sampling.min_p > 0.0 and not row.is_greedy, truncation.keep_min_p),
)
SETTINGS = (*TOKEN_ADJUSTMENTS, *_WHOLE_ROWS)
BEFORE_TRUNCATION = (*TOKEN_ADJUSTMENTS, TEMPERATURE)


def needs_no_text(sampling: Sampling) -> bool:
    """Whether logits and position alone decide each token, whatever the preceding tokens are.

    It is False for settings that name single tokens.
    """
    row = ChoiceContext(sampling, 0, 0, (), ())
    return sampling.grammar is None and not any(adjustment.applies(row) for adjustment in TOKEN_ADJUSTMENTS)


def reads_text(sampling: Sampling) -> bool:
    """Whether the choice of a token depends on the preceding tokens, not only on their number."""
    row = ChoiceContext(sampling, 0, 0, (), ())
    settings = (adjustment for adjustment in TOKEN_ADJUSTMENTS if adjustment.reads_text)
    return sampling.grammar is not None or any(adjustment.applies(row) for adjustment in settings)


def process(logits: Tensor, rows: Sequence[ChoiceContext], settings: Sequence[Setting] = SETTINGS) -> Tensor:
    """Applies the settings to each row that uses them. logits: [num_rows, vocab_size] of any float type.

    Returns float32 [num_rows, vocab_size], -inf at tokens that may not be chosen. The argument is not
    modified; it is returned itself if it is float32 and no row uses a setting.
    """
    processed = logits.float()
    if settings is SETTINGS and all(row.needs_no_text and row.mask is None for row in rows):
        settings = _WHOLE_ROWS
    for setting in settings:
        touched = [index for index, row in enumerate(rows) if setting.applies(row)]
        if touched and processed is logits:
            processed = logits.clone()
        if len(touched) == len(rows):
            setting.apply(processed, rows)
        elif touched:
            at = to_device(torch.tensor(touched), logits.device)
            part = processed[at]
            setting.apply(part, [rows[index] for index in touched])
            processed[at] = part
    return processed


def choose(processed: Tensor, rows: Sequence[ChoiceContext]) -> Tensor:
    """Returns the token with the largest perturbed logit; ties go to the lowest id: int64 [num_rows]."""
    return gumbel_max(processed, rows, 1)[0][:, 0]


def probabilities(processed: Tensor) -> Tensor:
    """Returns the distributions of tokens: float32 [num_rows, vocab_size], one-hot in greedy rows.

    A row whose softmax is NaN, because a logit is not finite, becomes one-hot at its largest number.
    """
    probs = processed.softmax(dim=1)
    likeliest = processed.nan_to_num(nan=BANNED).argmax(dim=1)
    one_hot = torch.nn.functional.one_hot(likeliest, processed.shape[1]).to(probs.dtype)
    return torch.where(probs.isnan().any(dim=1, keepdim=True), one_hot, probs)


def log_probabilities(
    logits: Tensor,  # [num_rows, vocab_size]
    tokens: Tensor,  # int64 [num_rows]
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities of the tokens, and of the likeliest tokens of each row.

    Returns:
        log-probabilities of ``tokens``, float32 [num_rows]; the likeliest tokens, int64 [num_rows, count];
        and their log-probabilities, float32 [num_rows, count].
    """
    own, ids, likeliest = [], [], []
    for first in range(0, max(len(logits), 1), SCORED_AT_ONCE):
        values = logits[first : first + SCORED_AT_ONCE].float().log_softmax(dim=1)
        own.append(values.gather(1, tokens[first : first + len(values), None])[:, 0])
        picked, of_picked = best(values, count)
        ids.append(picked)
        likeliest.append(of_picked)
    return torch.cat(own), torch.cat(ids), torch.cat(likeliest)


def scores(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities at each token: [num_rows] entries."""
    found = log_probabilities(logits, torch.tensor(tokens, device=logits.device), count)
    return tuple(map(told_logprobs, *(numbers.tolist() for numbers in found)))


def told_logprobs(chosen: float, ids: Sequence[int], likeliest: Sequence[float]) -> TokenLogprobs:
    """Returns the log-probabilities of one row, without banned tokens."""
    pairs = zip(ids, likeliest, strict=True)
    return TokenLogprobs(chosen, tuple((token, value) for token, value in pairs if value > BANNED))
