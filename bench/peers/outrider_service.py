"""Our service, asked over gRPC at the gateway's own port, with a chunk for each step.

Draft and target have a process each. The target has as many threads as the other peers, the draft has one
thread.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.engine import CACHE_BYTES
from bench.peers.answering import Answers, answer_task, read_task
from protos import generation_pb2, generation_pb2_grpc
from tests.support.running import serving


def main() -> None:
    task = read_task()
    of_target = {"dtype": "float32", "threads": task.threads, "cache_memory": CACHE_BYTES}
    settings = {"target": task.target} | {f"target.{name}": value for name, value in of_target.items()}
    speculation = generation_pb2.SpeculationSettings(mode="off")
    if task.draft is not None:
        settings["draft"] = task.draft
        mode = "auto" if task.depth is None else "fixed"
        speculation = generation_pb2.SpeculationSettings(mode=mode, depth=task.depth)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), settings) as service:

        def answer(prompts: list[list[int]], seeds: Sequence[int] | None) -> Answers:
            temperature = 0.0 if seeds is None else task.temperature
            requests = [
                generation_pb2.GenerateRequest(
                    tokens=generation_pb2.TokenIds(ids=prompt),
                    speculation=speculation,
                    sampling=generation_pb2.Sampling(
                        max_tokens=task.tokens,
                        ignore_eos=True,
                        temperature=temperature,
                        seed=seeds[number] if seeds else 0,
                    ),
                )
                for number, prompt in enumerate(prompts)
            ]
            return asyncio.run(_answered(service.direct, requests))

        answer_task(task, answer)


async def _answered(address: str, requests: Sequence[generation_pb2.GenerateRequest]) -> Answers:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def answered(request: generation_pb2.GenerateRequest) -> tuple[list[int], int]:
            chunks = [chunk async for chunk in stub.Generate(request)]
            token_ids = [token for chunk in chunks for token in chunk.token_ids]
            return token_ids, chunks[-1].usage.speculation.target_passes

        answers = await asyncio.gather(*map(answered, requests))
    return Answers([token_ids for token_ids, _ in answers], sum(passes for _, passes in answers))


if __name__ == "__main__":
    main()
