"""Adapters that come and go over HTTP: what callers are told, and what other gateways and targets know."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.fakes.adapter_store import MemoryAdapterStore
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, client_of
from tests.support.patience import eventually

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ALLOWED = {"adapter_folder": "/adapters", "max_loaded_adapters": 2, "adapters": ("fixed",)}


@pytest.fixture
def store():
    return MemoryAdapterStore()


def load(client, name, path, **fields):
    return client.post(LOAD, json={"lora_name": name, "lora_path": path, **fields})


def unload(client, name):
    return client.post(UNLOAD, json={"lora_name": name})


def answer(client, model):
    return client.post("/v1/completions", json={**ASK, "model": model})


async def models(client):
    return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


def refusal(response):
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_adapter_loaded_at_one_gateway_is_known_at_all_and_at_each_target(tokenizer, store):
    targets = [ScriptedTarget(ANSWER), ScriptedTarget(ANSWER)]
    async with (
        client_of(tokenizer, *targets, store=store, **ALLOWED) as one,
        client_of(tokenizer, targets[0], store=store, **ALLOWED) as other,
    ):
        loaded = await load(one, "a", "folder")
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert [target.adapters for target in targets] == [[b"folder"], [b"folder"]]
        assert await models(other) == ["m", "fixed", "a"]
        assert (await answer(other, "a")).json()["model"] == "a"
        (opening,) = [request.open for request in targets[0].requests if request.HasField("open")]
        assert (opening.adapter.name, opening.adapter.path, opening.adapter.digest) == (
            "a",
            "folder",
            b"folder",
        )
        unloaded = await unload(other, "a")
        assert (unloaded.status_code, unloaded.text) == (
            200,
            "Success: LoRA adapter 'a' removed successfully.",
        )
        assert targets[0].adapters == []
        assert await models(one) == ["m", "fixed"]
        assert refusal(await answer(one, "a")) == (
            404,
            "model",
            "model: 'a' is not served, 'm' and 'fixed' are",
        )


async def test_load_in_place_replaces_the_adapter_and_drops_the_old_one(tokenizer, store):
    target = ScriptedTarget(ANSWER)
    async with client_of(tokenizer, target, store=store, **ALLOWED) as client:
        await load(client, "a", "old")
        taken = refusal(await load(client, "a", "new"))
        assert taken[:2] == (400, "lora_name")
        assert "'a' is loaded already: load_inplace=true replaces it" in taken[2]
        assert (await load(client, "a", "new", load_inplace=True)).status_code == 200
        assert target.adapters == [b"new"]
        assert store.adapters["a"].path == "new"


async def test_load_that_a_target_refuses_is_undone_and_told(tokenizer, store):
    willing, unwilling = ScriptedTarget(ANSWER), ScriptedTarget(ANSWER, refused_adapter="odd")
    async with client_of(tokenizer, willing, unwilling, store=store, **ALLOWED) as client:
        refused = refusal(await load(client, "a", "odd"))
        assert refused == (400, "lora_path", "lora_path: adapters.a: refused")
        assert willing.adapters == []
        assert await models(client) == ["m", "fixed"]


@pytest.mark.parametrize(("names", "statuses"), [("aa", [200, 400]), ("abc", [200, 200, 400])])
async def test_loads_at_the_same_time_never_exceed_what_one_name_and_the_settings_allow(
    tokenizer, store, names, statuses
):
    """All of them have found room before the first is kept."""
    target = ScriptedTarget(ANSWER, loading=asyncio.Event())
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(client_of(tokenizer, target, store=store, **ALLOWED))
            for _ in names
        ]
        loads = [
            asyncio.ensure_future(load(client, name, f"{name}{number}"))
            for number, (client, name) in enumerate(zip(clients, names, strict=True))
        ]
        await eventually(lambda: target.asked_to_load == len(names))
        target.loading.set()
        answers = await asyncio.gather(*loads)
        assert sorted(answer.status_code for answer in answers) == statuses
        assert {adapter.digest for adapter in store.adapters.values()} == {*target.adapters}


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "message"),
    [
        (LOAD, {"lora_name": "m", "lora_path": "x"}, 400, "lora_name", "'m' is of the settings"),
        (LOAD, {"lora_name": "fixed", "lora_path": "x"}, 400, "lora_name", "'fixed' is of the settings"),
        (
            LOAD,
            {"lora_name": "../a", "lora_path": "x"},
            400,
            "lora_name",
            "'../a' does not match ^[A-Za-z0-9]",
        ),
        (LOAD, {"lora_name": "a"}, 400, "lora_path", "Field required"),
        (LOAD, {"lora_name": "a", "lora_path": ""}, 400, "lora_path", "at least 1"),
        (UNLOAD, {"lora_name": "fixed"}, 400, "lora_name", "'fixed' is of the settings"),
        (UNLOAD, {"lora_name": "a"}, 404, "lora_name", "'a' is not loaded, there are none"),
    ],
)
async def test_wrong_request_is_refused_by_its_field(tokenizer, store, path, body, status, field, message):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), store=store, **ALLOWED) as client:
        refused = refusal(await client.post(path, json=body))
    assert refused[:2] == (status, field)
    assert message in refused[2]


async def test_load_beyond_the_most_is_refused(tokenizer, store):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), store=store, **ALLOWED) as client:
        for name in "ab":
            assert (await load(client, name, name)).status_code == 200
        refused = refusal(await load(client, "c", "c"))
        assert refused[:2] == (400, "lora_name")
        assert "'c' would be one more than target.max_loaded_adapters=2: unload one first" in refused[2]
        assert (await load(client, "b", "c", load_inplace=True)).status_code == 200


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_service_without_an_adapter_folder_changes_no_adapter(tokenizer, path):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        refused = refusal(
            await client.post(
                path, json={"lora_name": "a", "lora_path": "a"} if path == LOAD else {"lora_name": "a"}
            )
        )
    assert refused[:2] == (403, None)
    assert "target.adapter_folder names a folder from which requests may load them" in refused[2]


async def test_caller_without_a_key_changes_no_adapter(tokenizer, store):
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=("k",), store=store, **ALLOWED) as client:
        assert (await load(client, "a", "a")).status_code == 401
        assert (await unload(client, "a")).status_code == 401


async def test_load_without_a_target_is_refused_for_now(tokenizer, store):
    async with client_of(tokenizer, store=store, **ALLOWED) as client:
        assert (await load(client, "a", "a")).status_code == 503
