"""A batch request gives its permit to an interactive request and goes on later, with the same text."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from gateway.errors import DeadlineError, OverloadedError
from gateway.generation.admission import MIN_TURN, Admission
from gateway.generation.fair_queue import PROMOTED_AFTER_S
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.loop.parking import Parking
from gateway.settings import GatewaySettings, Speculation
from gateway.tenants.tenant import Claim, Tenant
from outrider.decoding.settings import Sampling
from tests.fakes.scripted import ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import LIMIT_S, eventually

TEXT = "Grüße, a long answer with 😀 in it. " * 4
ANSWER = list(TEXT.encode())
SETTINGS = GatewaySettings(model="m", tokenizer="unused", max_requests=1)
MODES = {
    "off": Speculation(mode="off"),
    "auto": Speculation(),
    "deep": Speculation(mode="fixed", depth=8),
    "ngram": Speculation(drafter="ngram"),
    "suffix": Speculation(drafter="suffix"),
    "mixed": Speculation(drafter="model+suffix"),
}


def request(mode="off", priority="batch", n=1):
    return Request(("x",), Sampling(max_tokens=len(ANSWER)), speculation=MODES[mode], priority=priority, n=n)


class Reading:
    """Chunks of a request, read by a task."""

    def __init__(self, generation, prepared):
        self.chunks = []
        self.task = asyncio.create_task(self._read(generation.chunks(prepared)))

    async def _read(self, chunks):
        async with aclosing(chunks):
            async for chunk in chunks:
                self.chunks.append(chunk)

    def text(self, choice=0):
        return "".join(chunk.text for chunk in self.chunks if chunk.choice == choice)


async def answered(generation, asked):
    """Chunks of a request, and the numbers of parked requests at each of them."""
    prepared, parked = await generation.prepare(asked), []
    async with aclosing(generation.chunks(prepared)) as chunks:
        told = [chunk async for chunk in chunks if parked.append(generation.admission.parked) is None]
    return told, parked


def open_streams(fleet):
    return [link.streams for link in fleet.links()]


@pytest.mark.parametrize(("mode", "n"), [*((mode, 1) for mode in MODES), ("deep", 3)])
async def test_parked_request_has_the_text_of_an_undisturbed_request(tokenizer, mode, n):
    target, draft = ScriptedTarget(ANSWER, step_s=1e-4), ScriptedDraft(ANSWER, wrong=[3, 11, 24, 90])
    async with fleet_of(target, draft) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        batch = Reading(generation, await generation.prepare(request(mode, n=n)))
        await eventually(lambda: len(batch.chunks) >= 3)
        told, parked = await answered(generation, request(mode, "interactive"))
        assert set(parked) == {1}
        assert "".join(chunk.text for chunk in told) == TEXT
        assert not batch.task.done()
        await batch.task
        assert [batch.text(choice) for choice in range(n)] == [TEXT] * n
        usage = batch.chunks[-1].usage
        assert usage.completion_tokens == n * len(ANSWER)
        assert usage.stats.tokens == n * len(ANSWER)  # tokens before the pause included
        assert usage.stats.lost_targets == 0
        tenant = generation.tenants.of(None)
        assert tenant.counts.parked == 1
        assert tenant.served == pytest.approx(2 + (n + 1) * len(ANSWER))  # each token counts once
        await eventually(lambda: not any(open_streams(fleet)))
    assert target.kinds().count("open") == 2 * n + 1


@pytest.mark.parametrize("mode", MODES)
async def test_parked_request_leaves_its_target_at_once(tokenizer, mode):
    """Even if its reader pauses: nothing of it is at the target while it has no permit."""
    workers = ScriptedTarget(ANSWER, step_s=1e-4), ScriptedDraft(ANSWER, wrong=[3, 11, 24, 90])
    async with fleet_of(*workers) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        async with aclosing(generation.chunks(await generation.prepare(request(mode)))) as paused:
            text = (await anext(paused)).text
            urgent = await generation.prepare(request(priority="interactive"))
            async with aclosing(generation.chunks(urgent)) as chunks:
                await anext(chunks)
                assert open_streams(fleet)[0] == 1  # the target has the urgent request alone
                assert generation.admission.parked == 1
            assert generation.admission.parked == 0
            text += "".join([chunk.text async for chunk in paused])
    assert text == TEXT


class Caching(ScriptedTarget):
    """Finds five tokens of each prompt in its cache, and all that it has said."""

    def _reply(self, turn, generated, drafted):
        reply = super()._reply(turn, generated, drafted)
        reply.timings.cached_tokens = 5 + generated
        return reply


async def test_parked_request_counts_cached_tokens_of_its_first_opening_alone(tokenizer):
    async with fleet_of(Caching(ANSWER, step_s=1e-4)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        batch = Reading(generation, await generation.prepare(request()))
        await eventually(lambda: batch.chunks)
        await answered(generation, request(priority="interactive"))
        await batch.task
    assert batch.chunks[-1].usage.cached_tokens == 5


async def test_parked_request_fails_at_its_deadline(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=1e-3)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        short = replace(await generation.prepare(request()), deadline=asyncio.get_running_loop().time() + 0.2)
        batch = Reading(generation, short)
        await eventually(lambda: batch.chunks)
        urgent = await generation.prepare(request(priority="interactive"))
        async with aclosing(generation.chunks(urgent)) as chunks:
            await anext(chunks)
            with pytest.raises(DeadlineError):
                await batch.task
            assert (generation.admission.parked, generation.admission.running) == (0, 1)


async def test_parked_request_whose_reader_leaves_is_forgotten(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=1e-4)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        batch = Reading(generation, await generation.prepare(request()))
        await eventually(lambda: batch.chunks)
        urgent = await generation.prepare(request(priority="interactive"))
        async with aclosing(generation.chunks(urgent)) as chunks:
            await anext(chunks)
            batch.task.cancel()
            await asyncio.wait({batch.task})
            assert generation.admission.parked == 0
        async with asyncio.timeout(LIMIT_S):
            await generation.admission.idle()


async def test_leaving_service_counts_and_ends_parked_requests(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER, step_s=1e-3)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        batch = Reading(generation, await generation.prepare(request()))
        await eventually(lambda: batch.chunks)
        urgent = Reading(generation, await generation.prepare(request(priority="interactive")))
        await eventually(lambda: urgent.chunks)
        assert await generation.leave(0.0) == 2
        results = await asyncio.gather(batch.task, urgent.task, return_exceptions=True)
    assert all("is being stopped" in str(error) for error in results)


class Parked(Parking):
    """Records whether its request is parked."""

    is_parked = False

    def park(self):
        self.is_parked = True

    def resume(self):
        self.is_parked = False


class Queue:
    """Requests before an Admission, each held until it is let go."""

    def __init__(self, max_requests, max_waiting=9):
        self.admission = Admission(max_requests, max_waiting)
        self._stack = AsyncExitStack()
        self._tasks = []
        self.tenant = Tenant("a")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        for _, let_go, _task in self._tasks:
            let_go.set()
        await asyncio.gather(*(task for _, _, task in self._tasks))

    async def ask(self, priority):
        """Returns the request's parking, its permit once it has one, and an event that ends it."""
        parking, let_go, permits = Parked(), asyncio.Event(), []
        deadline = asyncio.get_running_loop().time() + LIMIT_S

        async def hold():
            async with self.admission.permit(deadline, Claim(self.tenant, priority), parking) as permit:
                permits.append(permit)
                await let_go.wait()

        before = self.admission.under_way
        self._tasks.append((parking, let_go, asyncio.create_task(hold())))
        await eventually(lambda: self.admission.under_way > before)
        await asyncio.sleep(0)
        return parking, permits, let_go


async def test_batch_request_with_the_fewest_tokens_is_parked():
    async with Queue(max_requests=3) as queue:
        requests = [await queue.ask("batch") for _ in range(3)]
        for (_, (permit,), _), tokens in zip(requests, (20, 10, 30), strict=True):
            queue.admission.count(permit, tokens)
        await queue.ask("interactive")
        assert [parking.is_parked for parking, _, _ in requests] == [False, True, False]
        assert (queue.admission.running, queue.admission.parked, queue.admission.waiting) == (3, 1, 0)


@pytest.mark.parametrize(("runs", "waits"), [("interactive", "interactive"), ("batch", "batch")])
async def test_request_is_not_parked_for_a_request_of_its_priority(runs, waits):
    async with Queue(max_requests=1) as queue:
        parking, _, _ = await queue.ask(runs)
        await queue.ask(waits)
        assert not parking.is_parked
        assert queue.admission.waiting == 1


async def test_parked_requests_count_in_the_bounded_queue_of_batch_requests():
    async with Queue(max_requests=1, max_waiting=1) as queue:
        await queue.ask("batch")
        await queue.ask("interactive")
        assert (queue.admission.running, queue.admission.parked) == (1, 1)
        batch, deadline = Claim(queue.tenant, priority="batch"), asyncio.get_running_loop().time() + LIMIT_S
        with pytest.raises(OverloadedError, match="1 requests run and 1 wait"):
            async with queue.admission.permit(deadline, batch):
                pass


async def test_request_is_parked_again_only_after_its_least_turn():
    async with Queue(max_requests=1) as queue:
        parking, (permit,), _ = await queue.ask("batch")
        _, _, let_go = await queue.ask("interactive")
        assert parking.is_parked
        let_go.set()
        await eventually(lambda: not parking.is_parked)
        await queue.ask("interactive")
        queue.admission.count(permit, MIN_TURN - 1)
        assert not parking.is_parked
        queue.admission.count(permit, 1)  # an interactive request waits for it
        assert parking.is_parked
        assert queue.tenant.counts.parked == 2


async def test_parked_request_comes_after_interactive_requests_and_before_younger_batch_requests():
    async with Queue(max_requests=1) as queue:
        parking, _, ends = await queue.ask("batch")
        _, second, _ = await queue.ask("batch")
        _, _, let_go = await queue.ask("interactive")
        _, third, let_third_go = await queue.ask("interactive")
        let_go.set()
        await eventually(lambda: third)
        assert parking.is_parked
        let_third_go.set()
        await eventually(lambda: not parking.is_parked)
        assert not second
        ends.set()
        await eventually(lambda: second)


async def test_parked_request_does_not_count_as_long_waiting_at_once():
    """It would win its permit back from the request for which it was parked."""
    async with Queue(max_requests=1) as queue:
        parking, (permit,), _ = await queue.ask("batch")
        permit.since -= PROMOTED_AFTER_S + 1  # it came long ago
        await queue.ask("interactive")
        assert parking.is_parked
