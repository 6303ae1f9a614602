"""A parked request goes on with the same sampled text: real engines of the demo pair, behind real gRPC."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from gateway.generation.generation import Generation
from gateway.generation.request import Chunk, Request
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from tests.support.pair import worker_of
from tests.support.trust import TRUST

SAMPLING = Sampling(max_tokens=60, temperature=1.0, seed=7, ignore_eos=True)


@asynccontextmanager
async def generation_of() -> AsyncIterator[Generation]:
    """A gateway's work with a single slot, over the demo pair."""
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(worker_of("target", 0.0, cache_memory=2**24)),
            await stack.enter_async_context(worker_of("draft", 0.0, cache_memory=2**24)),
        ]
        fleet = Fleet(lambda: workers, TRUST)
        stack.push_async_callback(fleet.close)
        settings = GatewaySettings(model="m", tokenizer="unused", max_requests=1)
        yield Generation(settings, Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json")), fleet)


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token.id for chunk in chunks for token in chunk.tokens]


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("mode", ["off", "fixed"])
async def test_parked_request_has_the_sampled_text_of_an_undisturbed_request(mode: str) -> None:
    asked = Request(
        ("Once upon a time",),
        SAMPLING,
        speculation=Speculation.model_validate({"mode": mode, "depth": 3 if mode == "fixed" else None}),
        priority="batch",
    )
    urgent = replace(asked, sampling=SAMPLING.model_copy(update={"seed": 8}), priority="interactive")
    async with generation_of() as generation:
        undisturbed = [chunk async for chunk in generation.chunks(await generation.prepare(asked))]
        async with aclosing(generation.chunks(await generation.prepare(asked))) as chunks:
            parked = [await anext(chunks), await anext(chunks)]
            between = [chunk async for chunk in generation.chunks(await generation.prepare(urgent))]
            parked += [chunk async for chunk in chunks]
        assert generation.tenants.of(None).counts.parked == 1
    assert tokens_of(parked) == tokens_of(undisturbed) != tokens_of(between)
    assert len(tokens_of(parked)) == 60
    first, last = undisturbed[-1].usage, parked[-1].usage
    assert first is not None
    assert last is not None
    assert last.cached_tokens <= last.prompt_tokens == first.prompt_tokens
