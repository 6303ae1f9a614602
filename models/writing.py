"""Text written by a model, many rows at once."""

from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def write(model: Any, prompts: Tensor, count: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Continue prompts of one length by `count` tokens; temperature 0 is greedy. The end-of-text token stops nothing.

    Args:
        prompts: int64 [rows, prompt_length].

    Returns:
        int64 [rows, prompt_length + count], the prompts included.
    """
    text, cache, unread = prompts, None, prompts
    for _ in range(count):
        output = model(input_ids=unread, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()  # [rows, vocab_size]
        if temperature == 0:
            unread = logits.argmax(-1, keepdim=True)
        else:
            unread = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text = torch.cat([text, unread], dim=1)
    return text
