"""Generation service over workers with scripted answers."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api import grpc_api
from gateway.errors import (
    GatewayError,
    InvalidRequestError,
    OverloadedError,
    UnauthenticatedError,
    WorkerLostError,
)
from protos import generation_pb2
from tests.fakes.scripted import MAX_LENGTH, ScriptedDraft, ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
FIXED = generation_pb2.SpeculationSettings(mode="fixed", depth=4)
SAMPLING = generation_pb2.Sampling(max_tokens=len(ANSWER), seed=4)


@pytest.mark.parametrize(
    "prompt", [{"text": "x"}, {"tokens": generation_pb2.TokenIds(ids=[120])}], ids=["text", "token ids"]
)
async def test_generate_chunks_make_the_answer(tokenizer, prompt):
    message = generation_pb2.GenerateRequest(sampling=SAMPLING, **prompt)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        chunks = [chunk async for chunk in servicer_of(fleet, tokenizer).Generate(message, Context())]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == ANSWER
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, len(ANSWER))
    assert last.usage.speculation.seed == 4
    assert last.usage.speculation.target_passes + last.usage.speculation.accepted == len(ANSWER)


async def test_usage_has_all_counters_of_speculation_only_in_a_report(tokenizer):
    usages = []
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        for report in (False, True):
            asked = generation_pb2.SpeculationSettings(mode="fixed", depth=4, report=report)
            message = generation_pb2.GenerateRequest(text="x", sampling=SAMPLING, speculation=asked)
            usages.append(
                (await servicer_of(fleet, tokenizer).Complete(message, Context())).usage.speculation
            )
    told = [{field.name for field, _ in usage.ListFields()} for usage in usages]
    assert told[0] == {"target_passes", "rounds", "drafted", "accepted", "seed"}
    assert told[1] > told[0] | {"mode", "drafter", "reached", "accepted_lengths", "drafted_by"}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"sampling": generation_pb2.Sampling(temperature=-1)}, "temperature"),
        ({"speculation": generation_pb2.SpeculationSettings(mode="sometimes")}, "mode"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"text": ""}, "prompt"),
        ({"n": 99}, "n"),
        ({"priority": "urgent"}, "priority"),
        ({"sampling": generation_pb2.Sampling(verification="block")}, "sampling.verification"),
        ({"text": "x" * 100_000}, "request"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"sampling": generation_pb2.Sampling(logit_bias=dict.fromkeys(range(5000), 1.0))}, "logit_bias"),
        ({"sampling": generation_pb2.Sampling(bad_token_ids=[1] * 1000)}, "bad_token_ids"),
        ({"speculation": generation_pb2.SpeculationSettings(drafter="medusa")}, "speculation.drafter"),
    ],
    ids=str,
)
async def test_generate_wrong_field_is_named(tokenizer, wrong, field):
    context = Context()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        message = generation_pb2.GenerateRequest(**{"text": "x", **wrong})
        with pytest.raises(InvalidRequestError):
            await anext(servicer_of(fleet, tokenizer, max_message_bytes=99_000).Generate(message, context))
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details.startswith(field)


async def test_generate_without_a_target_is_unavailable(tokenizer):
    context = Context()
    async with fleet_of(None) as fleet:
        with pytest.raises(WorkerLostError):
            await servicer_of(fleet, tokenizer).GetModel(generation_pb2.GetModelRequest(), context)
    assert context.code is grpc.StatusCode.UNAVAILABLE


async def test_get_model_names_the_workers(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        model = await servicer_of(fleet, tokenizer).GetModel(generation_pb2.GetModelRequest(), Context())
    assert (model.id, model.max_length) == ("m", MAX_LENGTH)
    assert [worker.role for worker in model.workers] == ["target", "draft"]


async def test_get_model_lists_the_adapters(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer, adapters=("brief", "legal"))
        model = await servicer.GetModel(generation_pb2.GetModelRequest(), Context())
    assert [*model.adapters] == ["brief", "legal"]


async def test_grpc_stream_tells_the_seed_first_and_the_origin_of_every_token(tokenizer):
    message = generation_pb2.GenerateRequest(text="x", sampling=SAMPLING)
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        chunks = [chunk async for chunk in servicer_of(fleet, tokenizer).Generate(message, Context())]
    origins = [[generation_pb2.Origin.Name(origin) for origin in chunk.origins] for chunk in chunks]
    assert origins[0] == ["ORIGIN_PLAIN"]
    assert origins[1] == [*["ORIGIN_ACCEPTED"] * 4, "ORIGIN_TARGET"]
    assert [chunk.HasField("seed") for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    assert all(sum(chunk.text_lengths) == len(chunk.text) for chunk in chunks)


@pytest.mark.parametrize("method", ["Generate", "Complete"])
async def test_generate_defect_hides_its_traceback(tokenizer, monkeypatch, method):
    def fail(*_):
        raise RuntimeError("a secret")

    monkeypatch.setattr(grpc_api, "_tokens", fail)
    context, message = Context(), generation_pb2.GenerateRequest(text="x", sampling=SAMPLING)
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        answer = getattr(servicer_of(fleet, tokenizer), method)(message, context)
        with pytest.raises(RuntimeError):
            await (anext(answer) if method == "Generate" else answer)
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details


async def test_complete_answer_is_one_message(tokenizer):
    message = generation_pb2.GenerateRequest(
        text="x", n=2, sampling=generation_pb2.Sampling(max_tokens=len(ANSWER), logprobs=2)
    )
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        completion = await servicer_of(fleet, tokenizer).Complete(message, Context())
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert (choice.text, list(choice.token_ids), choice.finish_reason) == (TEXT, ANSWER, "length")
        assert [position.token_ids[0] for position in choice.logprobs] == ANSWER
    assert completion.usage.completion_tokens == 2 * len(ANSWER)


async def test_tokenize_and_detokenize_return_the_text(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer)
        tokens = await servicer.Tokenize(generation_pb2.TokenizeRequest(text=TEXT), Context())
        text = await servicer.Detokenize(generation_pb2.DetokenizeRequest(ids=tokens.ids), Context())
        assert (list(tokens.ids), text.text) == (ANSWER, TEXT)
        with pytest.raises(InvalidRequestError, match="ids"):
            await servicer.Detokenize(generation_pb2.DetokenizeRequest(ids=[999]), Context())


async def test_loads_have_the_newest_report_of_each_worker(tokenizer):
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer)
        message = generation_pb2.GenerateRequest(text="x", sampling=SAMPLING)
        before = await servicer.GetLoads(generation_pb2.GetLoadsRequest(), Context())
        replies = servicer.Generate(message, Context())
        await anext(replies)
        during = await servicer.GetLoads(generation_pb2.GetLoadsRequest(), Context())
        await replies.aclose()
    assert [worker.HasField("running") for worker in before.workers] == [False, False]
    assert (before.running, during.running) == (0, 1)
    target = next(worker for worker in during.workers if worker.role == "target")
    assert (target.streams, target.HasField("running")) == (1, True)
    assert [depth.sequences for depth in during.depths] == [1]
    assert (before.gateway, len(before.tasks)) == (during.gateway, 0)
    assert sum(task.tokens for task in during.tasks) >= 1


async def test_generate_with_include_rounds_tells_rounds(tokenizer):
    fields = {"text": "x", "sampling": SAMPLING, "speculation": FIXED}
    async with fleet_of(ScriptedTarget(ANSWER), ScriptedDraft(ANSWER, wrong=[6])) as fleet:
        servicer = servicer_of(fleet, tokenizer)
        asked = generation_pb2.GenerateRequest(include_rounds=True, **fields)
        chunks = [chunk async for chunk in servicer.Generate(asked, Context())]
        unasked = [
            chunk async for chunk in servicer.Generate(generation_pb2.GenerateRequest(**fields), Context())
        ]
    rounds = [chunk.round for chunk in chunks if chunk.HasField("round")]
    usage = chunks[-1].usage.speculation
    assert (len(rounds), sum(len(round_.drafted) for round_ in rounds)) == (usage.rounds, usage.drafted)
    assert sum(len(round_.accepted) for round_ in rounds) == usage.accepted
    assert {round_.reason for round_ in rounds} == {"fixed"}
    assert all(round_.target_ms > 0 for round_ in rounds)
    assert not any(chunk.HasField("round") for chunk in unasked)


async def test_check_probe_sees_whether_requests_can_be_answered(tokenizer):
    for workers, status in (
        ((), "NOT_SERVING"),
        ((ScriptedTarget(ANSWER), ScriptedDraft(ANSWER)), "SERVING"),
    ):
        async with fleet_of(*workers) as fleet:
            servicer = servicer_of(fleet, tokenizer, keys=["secret"])
            response = await servicer.Check(health_pb2.HealthCheckRequest(), Context())
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(response.status) == status


@pytest.mark.parametrize(
    ("context", "keys", "allowed"),
    [
        (Context(), ["secret"], False),
        (Context(authorization="Bearer wrong"), ["secret"], False),
        (Context(authorization="Bearer secret"), ["secret"], True),
        (Context(peer="ipv4:10.1.2.3:9"), [], False),
        (Context(), [], True),
    ],
)
async def test_grpc_caller_without_access_is_refused(tokenizer, context, keys, allowed):
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer, keys=keys)
        if allowed:
            assert (await servicer.GetModel(generation_pb2.GetModelRequest(), context)).id == "m"
            return
        with pytest.raises(UnauthenticatedError):
            await servicer.GetModel(generation_pb2.GetModelRequest(), context)
        with pytest.raises(UnauthenticatedError):
            await anext(servicer.Generate(generation_pb2.GenerateRequest(text="x"), context))
    assert context.code is grpc.StatusCode.UNAUTHENTICATED


async def test_generate_full_queue_gives_a_retry_delay(tokenizer):
    context = Context()
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        servicer = servicer_of(fleet, tokenizer, max_requests=1, max_waiting=0)
        message = generation_pb2.GenerateRequest(text="x", sampling=SAMPLING)
        running = servicer.Generate(message, Context())
        await anext(running)
        with pytest.raises(OverloadedError):
            await servicer.Complete(message, context)
        await running.aclose()
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(context.trailing)["retry-after-ms"] == "1000"


numbers = st.integers(0, 2**32 - 1)
samplings = st.builds(
    generation_pb2.Sampling,
    temperature=st.none() | st.floats(),
    top_k=st.none() | numbers,
    top_p=st.none() | st.floats(),
    max_tokens=st.none() | numbers,
    min_tokens=st.none() | numbers,
    logit_bias=st.dictionaries(numbers, st.floats(), max_size=2),
    allowed_token_ids=st.lists(numbers, max_size=2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    noise_scope=st.none() | st.sampled_from(["prompt", "seed", "x"]),
    logprobs=st.none() | numbers,
    logprobs_of=st.none() | st.text(max_size=5),
)
messages = st.builds(
    generation_pb2.GenerateRequest,
    text=st.text(max_size=5),
    sampling=samplings,
    stop=st.lists(st.text(max_size=2), max_size=18),
    speculation=st.builds(
        generation_pb2.SpeculationSettings,
        mode=st.none() | st.sampled_from(["auto", "fixed", "off", "x"]),
        depth=st.none() | st.integers(0, 20),
        drafter=st.none() | st.sampled_from(["model", "ngram", "suffix", "model+suffix", ""]),
    ),
    n=st.none() | st.integers(0, 20),
    priority=st.none() | st.sampled_from(["batch", "x", "-3"]),
)


def test_grpc_random_message_is_never_a_defect(tokenizer):
    async def check(message):
        context = Context()
        async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
            try:
                await servicer_of(fleet, tokenizer).Complete(message, context)
            except GatewayError:
                assert context.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
    @given(messages)
    def run(message):
        asyncio.run(check(message))

    run()
