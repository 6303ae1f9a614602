"""The demo pair behind real gRPC in this process, and answers by the gateway's own loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache

from opentelemetry.trace import INVALID_SPAN, Span

from gateway.adapter import NO_ADAPTER, Adapter
from gateway.loop.answer_trace import NO_TRACE, AnswerTrace
from gateway.loop.factory import LoopFactory
from gateway.loop.loop import SequenceLoop
from gateway.loop.stats import Stats
from gateway.routing.paces import Paces
from gateway.sequence import GatewaySequence
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.drafters.registry import Place, drafters, split_name
from outrider.engine.settings import EngineSettings
from outrider.pace.settings import PaceSettings
from tests.support.demo_pair import prompt_of, text_of
from tests.support.local_worker import local_worker
from tests.support.patience import LIMIT_S, PATIENCE
from tests.support.relay import relay
from tests.support.trust import TRUST

TOKENS = 40
HELD_S = 0.1 * PATIENCE  # seconds that suffice to prepare a Draft, even on a busy machine
FIXED = Speculation(mode="fixed", depth=4)
OFF = Speculation(mode="off")


@asynccontextmanager
async def worker_of(role: Role, delay_s: float, **settings) -> AsyncIterator[WorkerInfo]:
    usual = {"model": str(DEMO / role), "dtype": "float32", "threads": 1, "cache_memory": 2**26}
    made = EngineSettings.model_validate({**usual, **settings})
    async with local_worker(role, made) as worker, relay(worker.address, delay_s) as far:
        yield replace(worker.published, address=far)


@asynccontextmanager
async def pair(
    branches: int, delay_s: float = 0.0, of_draft: dict[str, str] | None = None, **of_target
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker_of("target", delay_s, **of_target)),
            await stack.enter_async_context(
                worker_of("draft", delay_s, draft_ahead=branches, **of_draft or {})
            ),
        ]
        fleet = Fleet(lambda: workers, TRUST)
        stack.push_async_callback(fleet.close)
        yield fleet


@cache
def expected(kind: str, temperature: float) -> list[int]:
    return [*text_of(prompt_of(kind), TOKENS, temperature=temperature)]


async def answer(
    fleet: Fleet,
    kind: str,
    temperature: float,
    alternatives: int = 0,
    speculation: Speculation = FIXED,
    generation: Span = INVALID_SPAN,
    adapter: Adapter = NO_ADAPTER,
) -> tuple[list[int], Stats]:
    rounds = rounds_of(fleet, kind, temperature, speculation, generation, adapter)
    paced = rounds._source._policy.paced
    paced.decision = replace(paced.decision, alternatives=alternatives)  # a fixed mode keeps the decision
    text = [token.id async for step in rounds.steps() for token in step.tokens]
    return text, rounds.stats


def rounds_of(
    fleet: Fleet,
    kind: str,
    temperature: float,
    speculation: Speculation,
    generation: Span = INVALID_SPAN,
    adapter: Adapter = NO_ADAPTER,
) -> SequenceLoop:
    """Returns the loop of one answer before its start."""
    prompt = prompt_of(kind)
    settings = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=temperature)
    sequence = GatewaySequence(prompt, settings, noise_key(1, 0, prompt), adapter=adapter)
    paces = Paces(PaceSettings())
    trace = AnswerTrace(generation, 0, FIXED) if generation.is_recording() else NO_TRACE
    gateway = GatewaySettings(
        model="m",
        tokenizer="t",
        target_drafters=_target_drafters(speculation),
        propose_deadline_ms=1e3 * LIMIT_S,
    )
    return LoopFactory(fleet, paces, gateway).of(
        sequence,
        speculation.resolved("model", PaceSettings()),
        asyncio.get_running_loop().time() + LIMIT_S,
        trace=trace,
    )


def _target_drafters(speculation: Speculation) -> tuple[str, ...]:
    """Returns the target drafter of the speculation, if it names a target drafter."""
    rows = [row for row in drafters() if row.place is Place.TARGET_WORKER]
    return tuple(row.name for row in rows if row.name == split_name(speculation.drafter or "")[0])
