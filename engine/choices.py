"""Chooses tokens for a whole step at once, and hands every piece of work its part."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from decoding.draft import SparseProbs
from decoding.row import Row
from decoding.sampling import TokenLogprobs, choose, logprobs, probabilities, process, runners_up
from decoding.verify import sample_draft_token


@dataclass(frozen=True)
class Choices:
    """What the logits of one piece of work say."""

    rows: list[Row]
    logits: torch.Tensor  # [num_rows, vocab_size]
    processed: torch.Tensor  # float32 [num_rows, vocab_size], after every sampling setting
    ranked: list[tuple[int, ...]]  # [num_rows] the best tokens under the keyed noise, best first

    @property
    def chosen(self) -> list[int]:
        """[num_rows] by the coupled rule."""
        return [best[0] for best in self.ranked]

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


def choose_tokens(logits: torch.Tensor, rows: Items[list[Row]], ranks: int = 1) -> list[Choices]:
    """One Choices per piece of work, whose rows follow one another in ``logits`` [num_rows, vocab_size].

    ranks: tokens to be found for each row.
    """
    every = [row for part in rows for row in part]
    if not every:
        return [Choices([], logits, logits, []) for _ in rows]
    processed = process(logits, every)
    best = choose(processed, every)[:, None] if ranks == 1 else runners_up(processed, every, ranks)
    ranked = [tuple(row) for row in best.tolist()]
    choices, start = [], 0
    for part in rows:
        end = start + len(part)
        choices.append(Choices(part, logits[start:end], processed[start:end], ranked[start:end]))
        start = end
    return choices
