"""Chooses tokens for a whole step at once, and hands every piece of work its part."""

import operator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from outrider.decoding.draft import SparseProbs
from outrider.decoding.row import Row
from outrider.decoding.sampling import TokenLogprobs, choose, logprobs, probabilities, process, runners_up
from outrider.decoding.verify import sample_draft_token


@dataclass(frozen=True)
class Choices:
    """What the logits of one piece of work say."""

    rows: list[Row]
    logits: torch.Tensor  # [num_rows, vocab_size]
    processed: torch.Tensor  # float32 [num_rows, vocab_size], after every sampling setting
    ranked: list[tuple[int, ...]]  # [num_rows] the best tokens under the keyed noise, best first
    are_sound: list[bool]  # [num_rows] false where no token may come from the row: a number is not finite
    hidden: torch.Tensor | None = None  # [num_rows, num_layers, hidden_size] of layers asked for

    @property
    def chosen(self) -> list[int]:
        """[num_rows] by the coupled rule."""
        return [best[0] for best in self.ranked]

    def limited(self, are_finite: list[bool]) -> "Choices":
        """Without a token after one whose keys and values are not finite.

        are_finite: per token that its piece of work fed; the rows are those of the last of them.
        """
        if all(are_finite):
            return self
        of_rows = are_finite[len(are_finite) - len(self.rows) :]
        return replace(self, are_sound=[*map(operator.and_, self.are_sound, of_rows)])

    def target_probs(self) -> torch.Tensor:
        """[num_rows, vocab_size]"""
        return probabilities(self.processed)

    def sample_draft_token(self, round: int) -> tuple[int, SparseProbs]:
        """The only row's token under the ratio rules, and the distribution it was sampled from."""
        (row,) = self.rows
        return sample_draft_token(self.processed[0], row.noise_key, row.position, round)

    def logprobs(self, indices: Items[int], tokens: Items[int]) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of ``tokens``, chosen at the rows ``indices``; empty unless the request asked."""
        if self.rows[0].sampling.logprobs is None:
            return ()
        picked = torch.tensor(indices, device=self.logits.device)
        rows = [self.rows[index] for index in indices]
        found = logprobs(self.logits[picked], self.processed[picked], rows, list(tokens))
        return tuple(one for one in found if one is not None)


def choose_tokens(
    logits: torch.Tensor, rows: Items[list[Row]], ranks: int = 1, hidden: torch.Tensor | None = None
) -> list[Choices]:
    """One Choices per piece of work, whose rows follow one another in ``logits`` [num_rows, vocab_size].

    Args:
        ranks: tokens to be found for each row.
        hidden: [num_rows, num_layers, hidden_size] of the same rows.
    """
    every = [row for part in rows for row in part]
    if not every:
        return [Choices([], logits, logits, [], []) for _ in rows]
    processed = process(logits, every)
    best = choose(processed, every)[:, None] if ranks == 1 else runners_up(processed, every, ranks)
    ranked = [tuple(row) for row in best.tolist()]
    are_sound = _are_sound(logits, processed).tolist()
    choices, start = [], 0
    for part in rows:
        own = slice(start, start + len(part))
        states = None if hidden is None else hidden[own]
        choices.append(Choices(part, logits[own], processed[own], ranked[own], are_sound[own], states))
        start += len(part)
    return choices


def _are_sound(logits: torch.Tensor, processed: torch.Tensor) -> torch.Tensor:
    """bool [num_rows]: the largest logit is a finite number, and still is after the sampling settings.

    That is so unless a logit is NaN or positive infinity, or all are negative infinity.
    """
    are_sound = logits.amax(dim=1).isfinite()
    return are_sound if processed is logits else are_sound & processed.amax(dim=1).isfinite()
