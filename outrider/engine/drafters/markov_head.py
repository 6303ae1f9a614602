"""Correction of a block's guesses by the drafted tokens before them, which no row of the block has seen.

Source: "DSpark", arXiv 2607.05147, 2026, in its three forms.
"""

import torch
from torch import Tensor, nn

VANILLA, GATED, RECURRENT = "vanilla", "gated", "rnn"  # names in configs
MARKOV_HEADS = (VANILLA, GATED, RECURRENT)


class MarkovHead(nn.Module):
    """Low-rank bias of a guess's logits by the token before it, which the row's state may gate.

    The recurrent form also depends on all earlier guesses, through a memory that each guess updates.
    """

    def __init__(self, kind: str, rank: int, size: int, vocabulary: int, draft_vocabulary: int) -> None:
        """
        Args:
            kind: a name of MARKOV_HEADS.
            rank: size of a token's embedding.
            size: size of a row's state.
            vocabulary: number of tokens of the target.
            draft_vocabulary: number of tokens that the draft knows.
        """
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocabulary, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if kind == GATED else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if kind == RECURRENT else None
        self.memory_size = rank if kind == RECURRENT else 0

    def forward(self, states: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Returns biases [num_rows, draft_vocabulary], and the memory for the next guesses.

        Args:
            states: [num_rows, hidden_size] states of the rows that guess.
            tokens: int64 [num_rows] token before each guess.
            memory: [num_rows, memory_size] memory after the previous guess; zero for the first guess.
        """
        known = self.markov_w1(tokens)
        if self.gate_proj is not None:
            known = known * self.gate_proj(torch.cat([states, known], dim=-1)).sigmoid()
        if self.joint_proj is not None:
            kept, new, known = self.joint_proj(torch.cat([memory, known, states], dim=-1)).chunk(3, dim=-1)
            kept, known = kept.sigmoid(), known.tanh()
            memory = kept * memory + (1.0 - kept) * new.tanh()
        bias: Tensor = self.markov_w2(known)
        return bias, memory
