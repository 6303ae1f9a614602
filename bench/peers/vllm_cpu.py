"""vLLM's build for CPUs, with its engine in this process."""

import os
from collections.abc import Sequence
from typing import Any

from bench.peers.answering import Answers, answer_task, read_task

CACHE_GB = "1"
LONGEST = 1024  # tokens of a sequence
MAX_SEQUENCES = 64


def main() -> None:
    task = read_task()
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": CACHE_GB,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(task.threads),
    }
    from vllm import LLM, SamplingParams, TokensPrompt

    speculation = {
        "model": task.draft,
        "method": "draft_model",
        "num_speculative_tokens": task.depth,
    }
    llm = LLM(
        model=task.target,
        dtype="float32",
        max_model_len=LONGEST,
        max_num_seqs=MAX_SEQUENCES,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=None if task.draft is None else speculation,
    )

    def answer(prompts: list[list[int]], seeds: Sequence[int] | None) -> Answers:
        settings = [
            SamplingParams(
                max_tokens=task.tokens,
                ignore_eos=True,
                temperature=0.0 if seeds is None else task.temperature,
                seed=None if seeds is None else seeds[number],
            )
            for number in range(len(prompts))
        ]
        before = _accepted(llm)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(asked, settings, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Answers(token_ids, sum(map(len, token_ids)) - (_accepted(llm) - before))

    answer_task(task, answer)


def _accepted(llm: Any) -> int:
    """Returns the number of accepted drafted tokens so far."""
    named = (metric for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_accepted_tokens")
    return sum(metric.value for metric in named)


if __name__ == "__main__":
    main()
