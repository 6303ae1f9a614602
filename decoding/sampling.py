"""From logits to tokens: every sampling setting at every position, then the choice under keyed noise.

Rows are independent: what comes out for one does not depend on which others are in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import adjustments, truncation
from decoding.draft import SparseProbs
from decoding.noise import Purpose, gumbel, gumbel_at, streams
from decoding.row import Row as Row

NO_TOKEN = -1  # where the settings of a row leave no token to choose


@dataclass(frozen=True)
class Setting:
    """One sampling setting (or a few that share their work)."""

    applies: Callable[[Row], bool]
    apply: Callable[[Tensor, Sequence[Row]], None]  # changes float32 [num_rows, vocab_size] in place


def _divide_by_temperature(logits: Tensor, rows: Sequence[Row]) -> None:
    logits /= torch.tensor([[row.sampling.temperature] for row in rows], device=logits.device)


# In the order in which they apply. Greedy rows skip what cannot change the likeliest token.
SETTINGS: tuple[Setting, ...] = (
    Setting(lambda row: bool(row.sampling.logit_bias), adjustments.add_bias),
    Setting(lambda row: row.sampling.repetition_penalty != 1.0, adjustments.penalize_repetition),
    Setting(
        lambda row: row.sampling.presence_penalty != 0.0 or row.sampling.frequency_penalty != 0.0,
        adjustments.penalize_output,
    ),
    Setting(lambda row: row.sampling.allowed_token_ids is not None, adjustments.ban_all_but_allowed),
    Setting(lambda row: bool(row.sampling.bad_token_ids), adjustments.ban_bad),
    Setting(lambda row: len(row.generated) + len(row.path) < row.sampling.min_tokens, adjustments.ban_ends),
    Setting(lambda row: row.mask is not None, adjustments.ban_masked),
    Setting(lambda row: row.sampling.temperature not in (0.0, 1.0), _divide_by_temperature),
    Setting(lambda row: row.sampling.top_k > 0 and not row.is_greedy, truncation.keep_top_k),
    Setting(lambda row: row.sampling.top_p < 1.0 and not row.is_greedy, truncation.keep_top_p),
    Setting(lambda row: row.sampling.min_p > 0.0 and not row.is_greedy, truncation.keep_min_p),
)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first


def process(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Applies every setting of each row to its logits, of any float type, [num_rows, vocab_size].

    Returns float32 [num_rows, vocab_size], -inf at tokens that may not be chosen. The argument is not
    changed; it is returned itself if it is float32 and no row asks for anything.
    """
    processed = logits.float()
    for setting in SETTINGS:
        touched = [index for index, row in enumerate(rows) if setting.applies(row)]
        if touched and processed is logits:
            processed = logits.clone()
        if len(touched) == len(rows):
            setting.apply(processed, rows)
        elif touched:
            part = processed[touched]
            setting.apply(part, [rows[index] for index in touched])
            processed[touched] = part
    return processed


def choose(processed: Tensor, rows: Sequence[Row]) -> Tensor:
    """int64 [num_rows]: each row's token, the largest of its perturbed logits, the lowest id among equals.

    NO_TOKEN where process() has left none.
    """
    return runners_up(processed, rows, 1)[:, 0]


def runners_up(processed: Tensor, rows: Sequence[Row], count: int) -> Tensor:
    """int64 [num_rows, count]: the tokens with the largest perturbed logits, the largest (choose()) first.

    NO_TOKEN where there are no more tokens.
    """
    return _best(perturb(processed, rows), count)


def margins(processed: Tensor, rows: Sequence[Row]) -> Tensor:
    """float32 [num_rows]: the largest perturbed logit minus the next; inf if there is no next."""
    perturbed = perturb(processed, rows)
    best = _best(perturbed, 2)
    first, second = perturbed.gather(1, best.clamp(min=0)).unbind(1)
    return torch.where(best[:, 1] == NO_TOKEN, torch.inf, first - second)


def perturb(processed: Tensor, rows: Sequence[Row]) -> Tensor:
    """float32 [num_rows, vocab_size]: with the Gumbel noise of (noise key, position), except in greedy rows.

    By the Gumbel-max trick the largest is distributed as softmax(processed). To be read only: a batch of
    greedy rows comes back itself.
    """
    sampled = [index for index, row in enumerate(rows) if not row.is_greedy]
    narrow = [index for index in sampled if _is_narrow(rows[index])]
    wide = [index for index in sampled if not _is_narrow(rows[index])]
    if len(wide) == len(rows):
        return gumbel(_choice_streams(rows, processed.device), processed.shape[1]).add_(processed)
    if not sampled:
        return processed
    perturbed = processed.clone()
    if wide:
        perturbed[wide] += gumbel(
            _choice_streams([rows[i] for i in wide], processed.device), processed.shape[1]
        )
    if narrow:
        row_streams = _choice_streams(rows, processed.device)
        index = torch.tensor(narrow, device=processed.device)
        at, token_ids = (processed[narrow] > -torch.inf).nonzero(as_tuple=True)
        perturbed[index[at], token_ids] += gumbel_at(row_streams, index[at], token_ids)
    return perturbed


def probabilities(processed: Tensor, rows: Sequence[Row]) -> Tensor:
    """float32 [num_rows, vocab_size]: the token's distribution under the settings; one-hot in greedy rows."""
    probs = processed.softmax(dim=1)
    greedy = [index for index, row in enumerate(rows) if row.is_greedy]
    if greedy:
        probs[greedy] = torch.nn.functional.one_hot(_argmax(processed[greedy]), processed.shape[1]).to(
            probs.dtype
        )
    return probs


def sparse(probs: Tensor) -> SparseProbs:
    """The support of one distribution, [vocab_size]."""
    token_ids = probs.nonzero().flatten()
    return SparseProbs(tuple(token_ids.tolist()), tuple(probs[token_ids].tolist()))


def logprobs(
    logits: Tensor,  # [num_rows, vocab_size], as they were before process()
    processed: Tensor,  # [num_rows, vocab_size]
    rows: Sequence[Row],
    chosen: Sequence[int],  # [num_rows]
) -> list[TokenLogprobs | None]:
    """Per row the log-probabilities it asks for, of raw or processed logits; None where it asks for none."""
    reported: list[TokenLogprobs | None] = []
    for index, row in enumerate(rows):
        count = row.sampling.logprobs
        if count is None:
            reported.append(None)
            continue
        source = logits if row.sampling.logprobs_of == "raw" else processed
        values = source[index].float().log_softmax(dim=0)
        top = [token for token in _best(values[None], count)[0].tolist() if token != NO_TOKEN]
        top_values = values[top].tolist()
        reported.append(TokenLogprobs(float(values[chosen[index]]), tuple(zip(top, top_values, strict=True))))
    return reported


def _is_narrow(row: Row) -> bool:
    """Whether the settings usually leave so few tokens that noise for those alone is cheaper."""
    sampling = row.sampling
    return (
        sampling.top_k > 0
        or sampling.top_p < 1.0
        or sampling.min_p > 0.0
        or sampling.allowed_token_ids is not None
    )


def _choice_streams(rows: Sequence[Row], device: torch.device) -> Tensor:
    keys, positions = [row.noise_key for row in rows], [row.position for row in rows]
    return streams(keys, positions, [0] * len(rows), Purpose.CHOICE, device)


def _best(values: Tensor, count: int) -> Tensor:
    """int64 [num_rows, count]: where the largest values are, the lowest index first among equals."""
    picks: list[Tensor] = []
    for turn in range(count):
        if turn == 1:
            values = values.clone()
        if turn > 0:
            values.scatter_(1, picks[-1].clamp(min=0)[:, None], -torch.inf)
        pick = _argmax(values)
        exhausted = values.gather(1, pick[:, None])[:, 0] == -torch.inf
        picks.append(pick.masked_fill_(exhausted, NO_TOKEN))
    return torch.stack(picks, dim=1) if picks else torch.empty(len(values), 0, dtype=torch.int64)


def _argmax(values: Tensor) -> Tensor:
    """int64 [num_rows]: the lowest index of the maximum."""
    if values.device.type == "cpu":
        return torch.from_numpy(
            values.numpy().argmax(axis=1)
        )  # eight times as fast as torch at a large vocabulary
    return values.argmax(dim=1)
