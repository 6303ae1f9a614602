"""Row: all that the choice of one token depends on besides its logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decoding.settings import Sampling


@dataclass(frozen=True)
class Row:
    """One position of one Sequence at which a token is to be chosen.

    The tokens before it are ``prompt``, ``generated`` and ``path``: the drafted tokens from the root of a
    Draft down to this position. Rows of one Sequence may share their lists, which nothing here changes.
    """

    sampling: Sampling
    noise_key: int  # unsigned 64-bit
    position: int  # of the token to be chosen: len(prompt) + len(generated) + len(path)
    prompt: Sequence[int]
    generated: Sequence[int]
    path: tuple[int, ...] = ()
    end_token_ids: frozenset[int] = frozenset()  # they end the generation, hence are banned before min_tokens
    mask: Tensor | None = None  # bool [vocab_size], true where a token may be chosen

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0.0
