"""transformers' `generate` with a batch, and its assisted generation with one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peers.answering import Answer, Answers, answer_task, read_task


def main() -> None:
    task = read_task()
    torch.set_num_threads(task.threads)
    target = _loaded(task.target)
    draft = None
    if task.draft is not None:
        draft = _loaded(task.draft)
        task = replace(task, streams=(1,))  # assisted generation refuses a batch
    answer_task(task, answer_with(target, draft, task.depth, task.tokens, task.temperature))


def answer_with(target: Any, draft: Any, depth: int | None, tokens: int, temperature: float) -> Answer:
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(count)
    if draft is not None:
        draft.generation_config.update(
            num_assistant_tokens=depth,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )

    def generated(prompts: list[list[int]], seed: int | None) -> list[list[int]]:
        token_ids, mask = padded(prompts)
        if seed is not None:
            torch.manual_seed(seed)
        made = target.generate(
            token_ids,
            attention_mask=mask,
            assistant_model=draft,
            do_sample=seed is not None,
            temperature=None if seed is None else temperature,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        ids: list[list[int]] = made[:, token_ids.shape[1] :].tolist()
        return ids

    def answer(prompts: list[list[int]], seeds: Sequence[int] | None) -> Answers:
        nonlocal passes
        passes = 0
        with torch.inference_mode():
            if seeds is None and draft is None:
                token_ids = generated(prompts, None)
            else:
                token_ids = [
                    ids
                    for number, prompt in enumerate(prompts)
                    for ids in generated([prompt], None if seeds is None else seeds[number])
                ]
        return Answers(token_ids, passes * len(prompts) if draft is None else passes)

    return answer


def padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns prompts as a batch for `generate`: padded on the left, with the attention mask.

    Both are [num_prompts, longest prompt], int64.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    token_ids = torch.tensor([[0] * pad + [*prompt] for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.arange(longest) >= torch.tensor(padding)[:, None]
    return token_ids, mask.long()


def _loaded(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
