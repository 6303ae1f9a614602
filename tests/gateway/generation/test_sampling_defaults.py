"""How a checkpoint would be sampled holds for requests that say nothing of it."""

import json

import pytest

from gateway.generation.sampling_defaults import load_sampling_defaults
from gateway.settings import GatewaySettings
from outrider.demo.prompts import DEMO
from protos.conversions import sampling_from_message
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, CHAT, client_of

OF_CHECKPOINT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


def settings_of(folder, **settings) -> GatewaySettings:
    return GatewaySettings(model="m", tokenizer=str(folder), **settings)


def write(folder, **config):
    (folder / "generation_config.json").write_text(json.dumps(config))


def test_defaults_come_from_the_generation_config(tmp_path):
    write(tmp_path, **OF_CHECKPOINT, do_sample=True, eos_token_id=[1], max_length=20, typical_p=0.9)
    assert load_sampling_defaults(settings_of(tmp_path)) == OF_CHECKPOINT
    assert load_sampling_defaults(settings_of(tmp_path, sampling_defaults="neutral")) == {}


def test_checkpoint_without_the_file_or_with_nulls_has_no_defaults(tmp_path):
    assert load_sampling_defaults(settings_of(tmp_path)) == {}
    write(tmp_path, temperature=None, top_p=None)
    assert load_sampling_defaults(settings_of(tmp_path)) == {}


def test_demo_pair_has_no_defaults_of_its_own():
    assert load_sampling_defaults(settings_of(DEMO / "target")) == {}


def test_top_k_that_keeps_all_tokens_in_other_servers_keeps_all(tmp_path):
    write(tmp_path, top_k=-1)
    assert load_sampling_defaults(settings_of(tmp_path)) == {"top_k": 0}


def test_default_that_cannot_be_sampled_with_is_named(tmp_path):
    write(tmp_path, temperature=0.6, top_p=1.5)
    with pytest.raises(ValueError, match=r"generation_config.json of .*top_p=1.5.*sampling_defaults=neutral"):
        load_sampling_defaults(settings_of(tmp_path))


BODIES = {
    "completions": ASK,
    "chat/completions": CHAT,
    "responses": {"input": "x", "max_output_tokens": len(ANSWER)},
}


@pytest.mark.parametrize("path", BODIES)
async def test_request_takes_the_defaults_that_it_does_not_name(tokenizer, path):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target, defaults=OF_CHECKPOINT) as client:
        named = {"temperature": 1.0, "top_k": 0, "top_p": None}
        answer = await client.post(f"/v1/{path}", json={**BODIES[path], **named})
        assert answer.status_code == 200, answer.text
    told = sampling_from_message(target.requests[0].open.sampling)
    assert (told.temperature, told.top_k) == (1.0, 0)
    assert (told.top_p, told.min_p, told.repetition_penalty) == pytest.approx((0.95, 0.1, 1.05))
    if path == "responses":
        assert (answer.json()["temperature"], answer.json()["top_p"]) == (1.0, 0.95)


async def test_health_tells_the_defaults(tokenizer):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), defaults=OF_CHECKPOINT) as client:
        assert (await client.get("/health")).json()["sampling_defaults"] == OF_CHECKPOINT
