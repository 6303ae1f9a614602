"""A request in, its answer out in pieces: the same in every mode, and refused before a worker sees it."""

import asyncio
from contextlib import aclosing

import anyio
import pytest

from gateway.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnknownModelError,
    WorkerLostError,
)
from gateway.generation.generation import Generation
from gateway.generation.request import Request
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from gateway.workers.streams import WorkerInfo
from outrider.decoding.settings import Sampling
from tests.fakes.scripted import MAX_LENGTH, TRUST, VOCAB_SIZE, ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.patience import LIMIT_S, eventually

TEXT = "Grüße, STOP and more 😀 of it"
ANSWER = list(TEXT.encode())
SETTINGS = GatewaySettings(model="m", tokenizer="unused")
MODES = {
    "off": Speculation(mode="off"),
    "auto": Speculation(),
    "deep": Speculation(mode="fixed", depth=8),
    "ngram": Speculation(drafter="ngram"),
    "suffix": Speculation(drafter="suffix"),
    "mixed": Speculation(drafter="model+suffix"),
}


def request(prompt="x", stop=(), mode="auto", model=None, n=1, **sampling):
    sampling = Sampling(**{"max_tokens": len(ANSWER), **sampling})
    return Request((prompt,), sampling, stop, MODES[mode], model, n)


async def answer(fleet, tokenizer, request, **limits):
    generation = Generation(SETTINGS.model_copy(update=limits), tokenizer, fleet)
    return [chunk async for chunk in generation.chunks(await generation.prepare(request))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [((), TEXT, len(ANSWER)), (("STOP",), "Grüße, ", 13), (("of", "more 😀"), "Grüße, STOP and ", 27)],
    ids=["to the end", "in one word", "within a character"],
)
async def test_chunks_in_every_mode_have_equal_text_count_and_finish(tokenizer, mode, stop, text, tokens):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3, 11, 24])) as fleet:
        chunks = await answer(fleet, tokenizer, request(stop=stop, mode=mode))
    last = chunks[-1]
    assert "".join(chunk.text for chunk in chunks) == text
    assert sum(len(chunk.tokens) for chunk in chunks) == last.usage.completion_tokens == tokens
    assert last.finish_reason == ("stop" if stop else "length")
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


@pytest.mark.parametrize("mode", MODES)
async def test_stop_string_is_a_normal_end_for_the_worker(tokenizer, mode):
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target, ScriptedDraft(ANSWER)) as fleet:
        await answer(fleet, tokenizer, request(stop=("STOP",), mode=mode))
        await target.ended.wait()
    assert target.kinds()[-1] == "close"


async def test_prepare_without_a_seed_draws_one(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        drawn = [await generation.prepare(request()) for _ in range(2)]
        again = await generation.prepare(request(seed=drawn[0].seed))
    assert drawn[0].seed != drawn[1].seed
    assert again.sequences[0].noise_key == drawn[0].sequences[0].noise_key


async def test_prompts_under_one_seed_share_no_noise(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        keys = {
            (await generation.prepare(request(prompt, seed=1))).sequences[0].noise_key
            for prompt in ("a", "b")
        }
    assert len(keys) == 2


async def test_prompts_of_scope_seed_share_the_noise_of_each_choice(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        asked = [request(prompt, seed=1, n=2, noise_scope="seed") for prompt in ("a", "bb")]
        one, other = [(await generation.prepare(each)).sequences for each in asked]
    assert [sequence.noise_key for sequence in one] == [sequence.noise_key for sequence in other]
    assert one[0].noise_key != one[1].noise_key


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": (VOCAB_SIZE + 1,)}, "prompt"),
        ({"max_tokens": MAX_LENGTH}, "max_tokens"),
        ({"stop": ("a", "")}, "stop"),
        ({"logit_bias": {9999: 1.0}}, "logit_bias"),
        ({"bad_token_ids": (9999,)}, "bad_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
    ],
    ids=str,
)
async def test_prepare_wrong_field_is_named_and_reaches_no_worker(tokenizer, wrong, field):
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target) as fleet:
        with pytest.raises(InvalidRequestError) as refused:
            await answer(fleet, tokenizer, request(**wrong))
    assert refused.value.field == field
    assert target.requests == []


async def test_prepare_bad_token_ids_that_leave_none_are_refused_by_their_name(tokenizer):
    count = tokenizer.get_vocab_size()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        await generation.prepare(request(bad_token_ids=tuple(range(count - 1))))
        with pytest.raises(InvalidRequestError, match=f"at most {count - 1} are accepted") as refused:
            await generation.prepare(request(bad_token_ids=tuple(range(count))))
    assert refused.value.field == "bad_token_ids"


async def test_prepare_of_another_model_is_refused(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        with pytest.raises(UnknownModelError, match="'other' is not served"):
            await answer(fleet, tokenizer, request(model="other"))


async def test_prepare_without_a_target_is_refused(tokenizer):
    async with fleet_of(None, ScriptedDraft(ANSWER)) as fleet:
        with pytest.raises(WorkerLostError, match="no target worker"):
            await answer(fleet, tokenizer, request())


async def test_workers_get_the_settings_of_the_request(tokenizer):
    target, draft = ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)
    async with fleet_of(target, draft) as fleet:
        await answer(fleet, tokenizer, request(temperature=0.5, top_k=7, seed=3))
    for opening in (target.requests[0].open, draft.requests[0].open):
        assert (opening.sampling.temperature, opening.sampling.top_k, opening.sampling.seed) == (0.5, 7, 3)
        assert opening.prompt_length == 1


async def test_choices_differ_in_noise_and_the_first_equals_a_single_answer(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        several = (await generation.prepare(request(seed=5, n=4))).sequences
        alone = (await generation.prepare(request(seed=5))).sequences
    assert len({sequence.noise_key for sequence in several}) == 4
    assert several[0].noise_key == alone[0].noise_key


@pytest.mark.parametrize("mode", MODES)
async def test_chunks_of_several_choices_are_whole_answers_and_usage_comes_last(tokenizer, mode):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[3])) as fleet:
        chunks = await answer(fleet, tokenizer, request(n=3, mode=mode))
    for choice in range(3):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        assert "".join(chunk.text for chunk in own) == TEXT
        assert [chunk.finish_reason for chunk in own].count("length") == 1
    assert [chunk.usage is not None for chunk in chunks].index(True) == len(chunks) - 1
    usage = chunks[-1].usage
    assert usage.completion_tokens == 3 * len(ANSWER)
    assert usage.stats.target_passes + usage.stats.accepted == 3 * len(ANSWER)


async def test_chunk_has_a_piece_of_text_for_every_token(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        chunks = await answer(fleet, tokenizer, request())
    assert all(len(chunk.pieces) == len(chunk.tokens) for chunk in chunks)
    assert "".join(piece.text for chunk in chunks for piece in chunk.pieces) == TEXT


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_prompt_tokens": 4}, "prompt"),
        ({"max_output_tokens": 8}, "max_tokens"),
        ({"max_choices": 1}, "n"),
    ],
    ids=str,
)
async def test_limits_of_the_deployment_refuse_longer_requests(tokenizer, limits, field):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        with pytest.raises(InvalidRequestError) as refused:
            await answer(fleet, tokenizer, request(prompt="12345", n=2), **limits)
    assert refused.value.field == field


async def test_chunks_of_more_requests_than_places_and_queue_are_refused(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        generation = Generation(
            SETTINGS.model_copy(update={"max_requests": 1, "max_waiting": 0}), tokenizer, fleet
        )
        async with aclosing(generation.chunks(await generation.prepare(request()))) as running:
            await anext(running)
            with pytest.raises(OverloadedError):
                await anext(generation.chunks(await generation.prepare(request())))
        assert len([chunk async for chunk in generation.chunks(await generation.prepare(request()))]) > 0


async def test_chunks_of_a_request_that_waited_tell_the_target_for_how_long(tokenizer):
    target = ScriptedTarget(ANSWER, step_s=0.002)
    async with fleet_of(target) as fleet:
        generation = Generation(SETTINGS.model_copy(update={"max_requests": 1}), tokenizer, fleet)
        both = [generation.chunks(await generation.prepare(request(mode="off"))) for _ in range(2)]
        read = [asyncio.create_task(_read(chunks)) for chunks in both]
        await asyncio.gather(*read)
    opened = [each.open for each in target.requests if each.WhichOneof("request") == "open"]
    assert opened[0].queued_ms < len(ANSWER) * 2 <= opened[1].queued_ms < 1000 * LIMIT_S


async def _read(chunks):
    return [chunk async for chunk in chunks]


async def test_limits_follow_the_shortest_context_of_all_targets(tokenizer):
    """Whichever takes it over: limits and defaults follow what the workers publish."""
    targets = [
        WorkerInfo("target", "m", f"127.0.0.1:{port}", 1, "n", VOCAB_SIZE, max_length)
        for port, max_length in ((1, 100), (2, 60))
    ]
    generation = Generation(SETTINGS, tokenizer, Fleet(lambda: targets, TRUST))
    assert (generation.limits.room(20), generation.limits.room(70)) == (40, 1)
    await generation.prepare(request("x" * 20, max_tokens=40))
    for prompt, max_tokens, field in ((20, 41, "max_tokens"), (60, 1, "prompt")):
        with pytest.raises(InvalidRequestError) as refused:
            await generation.prepare(request("x" * prompt, max_tokens=max_tokens))
        assert refused.value.field == field


async def test_verification_rule_reaches_the_workers(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target) as fleet:
        block = Speculation(mode="off", verification="block")
        await answer(fleet, tokenizer, Request(("x",), Sampling(max_tokens=len(ANSWER)), speculation=block))
    assert target.requests[0].open.sampling.verification == "block"


@pytest.mark.parametrize("mode", MODES)
async def test_reader_cancelled_over_and_over_leaves_nothing_open(tokenizer, mode):
    """Web frameworks close a stream like this when a client has gone."""
    answer = ANSWER * 20
    target, draft = ScriptedTarget(answer), ScriptedDraft(answer)
    async with fleet_of(target, draft) as fleet:
        generation = Generation(SETTINGS, tokenizer, fleet)
        prepared = await generation.prepare(request(mode=mode, max_tokens=len(answer)))
        reading = anyio.Event()

        async def read():
            async for _ in generation.chunks(prepared):
                reading.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await reading.wait()
            group.cancel_scope.cancel()
        await target.ended.wait()
        await eventually(lambda: draft.is_alone)
        await eventually(lambda: not any(link.streams for link in fleet.links()))
        assert generation.admission.running == 0


async def test_reader_that_pauses_holds_nothing_beyond_the_deadline(tokenizer):
    target = ScriptedTarget(ANSWER)
    async with fleet_of(target) as fleet:
        limits = {"request_deadline_s": 0.1}
        generation = Generation(SETTINGS.model_copy(update=limits), tokenizer, fleet)
        async with aclosing(generation.chunks(await generation.prepare(request(mode="off")))) as chunks:
            await anext(chunks)
            await target.ended.wait()
            await eventually(lambda: generation.admission.running == 0)
            with pytest.raises(DeadlineError, match="not read"):
                async for _ in chunks:
                    pass
