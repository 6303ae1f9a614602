"""Inputs of the choice of one token besides its logits, and a copy to the device that does not block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.grammar import Mask
from outrider.decoding.settings import Sampling

TokenIds = NDArray[np.int64]


@dataclass(frozen=True)
class TokenLists:
    """Token ids that the settings of a sequence name, as arrays that its rows share."""

    biased: TokenIds  # [num_biased]
    biases: NDArray[np.float32]  # [num_biased]
    allowed: TokenIds
    bad: TokenIds
    ends: TokenIds

    @classmethod
    def of(cls, sampling: Sampling, end_token_ids: Iterable[int]) -> "TokenLists":
        """Returns the lists for these settings, sorted and without duplicates."""
        biased = sorted(sampling.logit_bias)
        return cls(
            np.array(biased, np.int64),
            np.array([sampling.logit_bias[token_id] for token_id in biased], np.float32),
            np.unique(np.array(sampling.allowed_token_ids or (), np.int64)),
            np.unique(np.array(sampling.bad_token_ids, np.int64)),
            np.unique(np.fromiter(end_token_ids, np.int64)),
        )


@dataclass(frozen=True)
class ChoiceContext:
    """Position of a sequence at which a token is chosen, with everything that the choice depends on.

    The preceding tokens are ``prompt``, ``generated`` and ``path``. ``path`` holds the drafted tokens from
    the root of a Draft down to this position. Rows of one sequence may share their lists: they are read-only.
    """

    sampling: Sampling
    noise_key: int  # unsigned 64-bit
    position: int  # position in the keyed noise, see Sampling.noise_origin
    prompt: Sequence[int] | TokenIds
    generated: Sequence[int]
    path: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()  # tokens that end the generation; banned before min_tokens
    given_lists: TokenLists | None = None  # lists of the sequence; None: built on first use
    mask: Mask | None = None  # tokens that the grammar allows; None: all tokens
    needs_no_text: bool = False  # True: known that no setting changes or bans single tokens

    @cached_property
    def lists(self) -> TokenLists:
        """Token ids that the settings name."""
        return self.given_lists or TokenLists.of(self.sampling, self.end_token_ids)

    @property
    def may_be_stuck(self) -> bool:
        """Whether the settings combined could ban every token."""
        sampling, length = self.sampling, len(self.generated) + len(self.path)
        bans = sampling.allowed_token_ids is not None or sampling.bad_token_ids
        return bool(bans) or length < sampling.min_tokens or self.num_allowed == 0

    @cached_property
    def num_allowed(self) -> int | None:
        """Number of tokens that the grammar allows; None: all tokens."""
        return None if self.mask is None else int(np.bitwise_count(self.mask).sum())

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0.0


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device without waiting for work that is queued there."""
    if device.type == "cuda":  # a copy from pageable memory would block
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)
