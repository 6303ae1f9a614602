"""Text written by a model, many rows at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Choose = Callable[
    [Tensor, int], Tensor
]  # arguments: logits [rows, vocab_size], number of tokens written; result: tokens [rows]


@torch.inference_mode()
def write(model: Any, prompts: Tensor, count: int, choose: Choose, mask: Tensor | None = None) -> Tensor:
    """Continues every prompt by `count` tokens. No token ends a text.

    Args:
        prompts: int64 [rows, prompt_length].
        mask: int64 [rows, prompt_length], 0 at the padding on a prompt's left; None: no padding.

    Returns:
        int64 [rows, prompt_length + count], the prompts included.
    """
    text, cache, unread = prompts, None, prompts
    for written in range(count):
        output = model(input_ids=unread, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        unread = choose(output.logits[:, -1].float(), written)[:, None]
        text = torch.cat([text, unread], dim=1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(unread)], dim=1)
    return text


def sampler(temperature: float, generator: torch.Generator) -> Choose:
    """Returns a choice by temperature; 0 is greedy."""

    def choose(logits: Tensor, _: int) -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]

    return choose
