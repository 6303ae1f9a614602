"""A request that ends the process of every target that works on it: only that request fails.

Three targets, each a process of its own that is replaced when it is gone, as Serve replaces it.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.workers.streams import WorkerInfo
from outrider.demo.prompts import KINDS, prompts
from outrider.telemetry.reasons import FailureReason
from tests.support.patience import START_S, eventually
from tests.support.service import Service, service_of
from tests.support.worker_process import KILLED

KILLER = 2047  # the last token of the vocabulary: nobody else says it
TARGETS, STREAMS, TOKENS = 3, 8, 400
ROOT = Path(__file__).parents[2]


class Replicas:
    """Keeps so many target processes running, and has a service find them."""

    def __init__(self, found: list[WorkerInfo]) -> None:
        self._found = found
        self.ended: list[int] = []  # exit statuses, in their order
        self.are_needed = True

    async def run_one(self) -> None:
        while self.are_needed:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.worker_process", str(KILLER)),
                stdin=PIPE,
                stdout=PIPE,
                cwd=ROOT,
            )
            try:
                await self._publish(process)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def _publish(self, process: Process) -> None:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            told = json.loads(await process.stdout.readline())
        worker = WorkerInfo("target", "demo", node="here", **told)
        self._found.append(worker)
        status = await process.wait()
        self._found.remove(worker)
        self.ended.append(status)


@asynccontextmanager
async def replicated() -> AsyncIterator[tuple[Service, Replicas]]:
    async with service_of(targets=0, drafts=1) as service:
        replicas = Replicas(service.others)
        running = [asyncio.create_task(replicas.run_one()) for _ in range(TARGETS)]
        try:
            await eventually(lambda: len(service.others) == TARGETS, START_S)
            yield service, replicas
        finally:
            replicas.are_needed = False
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": prompts(KINDS[number % len(KINDS)], 4)[number % 4],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": (0.0, 0.8)[number % 2],
        "bad_token_ids": [KILLER],
        "seed": number,
        "speculation": ({"mode": "off"}, {"mode": "auto"}, {"mode": "fixed", "depth": 4})[number % 3],
    }


async def text_of(service: Service, asked: dict[str, Any]) -> str:
    response = await service.http.post("/v1/completions", json=asked, timeout=START_S)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.slow  # four processes, and three that take their place
async def test_request_that_kills_workers_fails_alone() -> None:
    async with replicated() as (service, replicas):
        expected = [await text_of(service, body(number)) for number in range(STREAMS)]
        streams = [asyncio.create_task(text_of(service, body(number))) for number in range(STREAMS)]
        generated = service.generation.totals
        await eventually(lambda: sum(stats.tokens for stats in generated.stats().values()) > STREAMS * TOKENS)
        killing = {"prompt": [5, 6, KILLER, 7], "max_tokens": 8, "seed": 1}
        response = await service.http.post("/v1/completions", json=killing, timeout=START_S)
        assert response.status_code == 500
        assert "3 target workers were lost with this request" in response.text
        assert await asyncio.gather(*streams) == expected
        assert replicas.ended == [KILLED] * 3
        failures = [stats.failures for stats in generated.stats().values() if stats.failures]
        assert failures == [{FailureReason.LOST_TARGETS: 1}]
