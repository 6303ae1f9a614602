"""Answers to all kinds of schemas: valid, and equal with Drafts, without Drafts, and amid losses."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.generation.form import Form, GrammarChecks
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.generation.vocabulary import load_tokenizer
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from tests.support.patience import LIMIT_S, later
from tests.support.process_worker import process_worker
from tests.support.schemas import SCHEMAS
from tests.support.service import engine_settings
from tests.support.trust import TRUST

SEEDS = 5  # answers to each schema
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
PROMPTS = ("Somebody as JSON: ", "{", "An answer: ")
TOKENS = 72
AT_A_TIME = 24
WAYS = {
    "off": Speculation(mode="off"),
    "a model": Speculation(mode="fixed", depth=4),
    "n-grams": Speculation(mode="fixed", depth=3, drafter="ngram"),
}


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str


def asked(name: str, seed: int) -> Request:
    number = seed + len(name)
    return Request(
        (PROMPTS[number % len(PROMPTS)],),
        Sampling(max_tokens=TOKENS, temperature=TEMPERATURES[number % len(TEMPERATURES)], seed=seed),
        form=Form("json_schema", json.dumps(SCHEMAS[name]), "schema"),
    )


@dataclass
class Processes:
    """Workers in separate processes, each of which can be killed."""

    ending: AsyncExitStack
    workers: list[WorkerInfo]

    async def start(self, role: Role) -> None:
        self.workers.append(
            await self.ending.enter_async_context(process_worker(role, engine_settings(role)))
        )

    def kill(self, role: Role) -> None:
        """Kills the oldest worker of the role."""
        worker = next(worker for worker in self.workers if worker.role == role)
        self.workers.remove(worker)
        os.kill(worker.ranks[0], signal.SIGKILL)


@asynccontextmanager
async def processes() -> AsyncIterator[tuple[Generation, Processes]]:
    async with AsyncExitStack() as ending:
        held = Processes(ending, [])
        await held.start("target")
        await held.start("draft")
        fleet = Fleet(lambda: [*held.workers], TRUST)
        ending.push_async_callback(fleet.close)
        folder = str(DEMO / "target")
        settings = GatewaySettings(model="m", tokenizer=folder, max_losses=10)
        yield Generation(settings, load_tokenizer(folder), fleet), held


Answers = dict[tuple[str, int], Answer]


async def answers(
    generation: Generation, held: Processes, speculation: Speculation, kills: Mapping[int, Role] | None = None
) -> tuple[Answers, int]:
    """Returns answers to every schema and seed, and how often a target was lost on the way.

    kills: by the number of answers that are there, the role of a worker that is killed then.
    """
    places, losses, ended = asyncio.Semaphore(AT_A_TIME), 0, 0

    async def answer(name: str, seed: int) -> Answer:
        nonlocal losses, ended
        async with places:
            prepared = await generation.prepare(replace(asked(name, seed), speculation=speculation))
            text = ""
            async for chunk in generation.chunks(prepared):
                text += chunk.text
            assert chunk.usage is not None
            losses += chunk.usage.stats.lost_targets
            ended += 1
            if (role := (kills or {}).get(ended)) is not None:
                held.kill(role)
            return Answer(text, chunk.finish_reason or "")

    keys = [(name, seed) for name in SCHEMAS for seed in range(SEEDS)]
    found = await asyncio.gather(*(answer(*key) for key in keys))
    return dict(zip(keys, found, strict=True)), losses


async def test_grammar_of_every_schema_is_accepted() -> None:
    with closing(GrammarChecks(load_tokenizer(str(DEMO / "target")), compile_s=2)) as grammars:
        for schema in SCHEMAS.values():
            assert await grammars.grammar(Form("json_schema", json.dumps(schema), "schema"), later(LIMIT_S))
    assert len(SCHEMAS) >= 30


@pytest.mark.slow
async def test_answers_are_valid_and_the_same_with_drafts_without_and_while_workers_are_killed() -> None:
    async with processes() as (generation, held):
        found: dict[str, Answers] = {}
        for name, speculation in WAYS.items():
            found[name], losses = await answers(generation, held, speculation)
            assert losses == 0
        spare: tuple[Role, ...] = ("target", "target", "draft")
        for role in spare:
            await held.start(role)
        kills: dict[int, Role] = {20: "target", 60: "draft", 100: "target"}
        found["amid losses"], losses = await answers(generation, held, WAYS["a model"], kills)
    assert losses > 0
    reference = found["off"]
    assert sum(map(len, found.values())) >= 500
    for way, texts in found.items():
        assert texts == reference, [key for key in reference if texts[key] != reference[key]] + [way]
    count: Counter[Any] = Counter(answer.finish_reason for answer in reference.values())
    print(f"{len(SCHEMAS)} schemas, {sum(map(len, found.values()))} answers, {losses} losses: {count}")
    for (name, _), answer in reference.items():
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMAS[name])
    assert count["stop"] > 0.6 * len(reference)
