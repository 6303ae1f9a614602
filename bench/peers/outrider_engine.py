"""Our engine in one process, together with the draft, if there is one draft: rounds of a fixed depth."""

from collections.abc import Sequence

import torch

from bench.engine import engine_of
from bench.peers.answering import Answers, answer_task, read_task
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.offline.speculate import OfflineRequest, generate


def main() -> None:
    task = read_task()
    torch.set_num_threads(task.threads)
    target = engine_of(task.target, task.threads)
    drafter = None if task.draft is None else DraftModel(engine_of(task.draft, task.threads))

    def answer(prompts: list[list[int]], seeds: Sequence[int] | None) -> Answers:
        temperature = 0.0 if seeds is None else task.temperature
        sampling = Sampling(temperature=temperature, max_tokens=task.tokens, ignore_eos=True)
        requests = [
            OfflineRequest(
                tuple(prompt), sampling, noise_key(seeds[number] if seeds else 0, 0, tuple(prompt))
            )
            for number, prompt in enumerate(prompts)
        ]
        outputs = generate(target, drafter, requests, (task.depth or 0) if drafter else 0)
        passes = sum(output.target_passes for output in outputs)
        return Answers([list(output.tokens) for output in outputs], passes)

    answer_task(task, answer)


if __name__ == "__main__":
    main()
