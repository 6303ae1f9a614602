"""OpenVINO GenAI's continuous batching, in float32. Checkpoints are exported first; exports are kept."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.answering import Answers, PeerTask, answer_task, read_task

CACHE_GB = 1


def main() -> None:
    task = read_task()
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": task.threads,
    }
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    models = {}
    if task.draft is not None:
        models["draft_model"] = openvino_genai.draft_model(_exported(task.draft), "CPU", **properties)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        _exported(task.target), scheduler, "CPU", properties | models
    )

    def answer(prompts: list[list[int]], seeds: Sequence[int] | None) -> Answers:
        drafted = {} if task.draft is None else {"num_assistant_tokens": task.depth}
        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=task.tokens, ignore_eos=True, **drafted, **_drawn(task, seeds, number)
            )
            for number in range(len(prompts))
        ]
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, configs)
        token_ids = [list(result.m_generation_ids[0]) for result in results]
        return Answers(token_ids, _passes(results, token_ids))

    answer_task(task, answer)


def _drawn(task: PeerTask, seeds: Sequence[int] | None, number: int) -> dict[str, Any]:
    """Returns the settings of a sampled answer; empty for a greedy answer."""
    if seeds is None:
        return {}
    return {
        "do_sample": True,
        "rng_seed": seeds[number],
        "temperature": task.temperature,
        "top_k": 2**31 - 1,  # all
        "top_p": 1.0,
    }


def _passes(results: Sequence[Any], token_ids: list[list[int]]) -> int | None:
    """Returns the number of passes: the generated tokens without accepted drafted tokens."""
    made = sum(map(len, token_ids))
    told = results[0].extended_perf_metrics  # summed over the batch; None: there is no draft
    return made if told is None else made - int(told.get_num_accepted_tokens())


def _exported(checkpoint: str) -> str:
    folder = Path("checkpoints") / "openvino" / Path(checkpoint).resolve().relative_to("/")
    if not (folder / "openvino_model.xml").exists():
        exporter = Path(sys.executable).parent / "optimum-cli"
        options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = [str(exporter), "export", "openvino", "--model", checkpoint, *options, str(folder)]
        subprocess.run(command, check=True)
    return str(folder)


if __name__ == "__main__":
    main()
