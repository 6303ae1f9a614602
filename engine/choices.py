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
    chosen: list[int]  # [num_rows] by the coupled rule

    def best(self, count: int) -> list[list[int]]:
        """Per row the ``count`` best tokens under the keyed noise, the chosen one first."""
        if count == 1:
            return [[token] for token in self.chosen]
        best: list[list[int]] = runners_up(self.processed, self.rows, count).tolist()
        return best

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


def choose_tokens(logits: torch.Tensor, rows: Items[list[Row]]) -> list[Choices]:
    """One Choices per piece of work, whose rows follow one another in ``logits`` [num_rows, vocab_size]."""
    every = [row for part in rows for row in part]
    if not every:
        return [Choices([], logits, logits, []) for _ in rows]
    processed = process(logits, every)
    chosen = choose(processed, every).tolist()
    choices, start = [], 0
    for part in rows:
        end = start + len(part)
        choices.append(Choices(part, logits[start:end], processed[start:end], chosen[start:end]))
        start = end
    return choices
