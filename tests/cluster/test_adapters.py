"""A real service whose adapters come and go over HTTP, with two targets and two gateways."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.demo.prompts import DEMO
from tests.support.adapters import write_adapter
from tests.support.patience import LIMIT_S
from tests.support.running import serving
from tests.support.served import SERVED

ASK = {"prompt": "import os", "seed": 1, "max_tokens": 32, "temperature": 0.7}
SEVERAL = 6  # requests, so that each gateway gets some


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("service")
    for seed, name in enumerate("ab", 1):
        write_adapter(folder / "adapters" / name, DEMO / "target", seed, strength=0.6)
    settings = {
        **SERVED,
        "target.replicas": 2,
        "gateway.replicas": 2,
        "target.adapter_folder": str(folder / "adapters"),
        "target.max_loaded_adapters": 2,
    }
    # A connection is kept at one gateway, so each request has its own.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        serving(folder, settings) as service,
        httpx.Client(base_url=service.http, timeout=LIMIT_S, limits=limits) as client,
    ):
        yield client


def texts(client: httpx.Client, model: str) -> set[str]:
    """Returns the texts of several requests, with Drafts and without."""
    found = set()
    for number in range(SEVERAL):
        mode = {"mode": "off"} if number % 2 else {"mode": "fixed", "depth": 4}
        answer = client.post("/v1/completions", json={**ASK, "model": model, "speculation": mode})
        assert answer.status_code == 200, answer.text
        found.add(answer.json()["choices"][0]["text"])
    return found


def statuses(client: httpx.Client, model: str) -> set[int]:
    """Returns the statuses of several requests."""
    asked = {**ASK, "model": model, "max_tokens": 1}
    return {client.post("/v1/completions", json=asked).status_code for _ in range(SEVERAL)}


def listed(client: httpx.Client) -> set[tuple[str, ...]]:
    """Returns what several lists of models tell."""
    answers = [client.get("/v1/models").json()["data"] for _ in range(SEVERAL)]
    return {tuple(model["id"] for model in models) for models in answers}


def test_service_with_an_adapter_folder_loads_replaces_and_unloads_an_adapter(client: httpx.Client) -> None:
    assert statuses(client, "mine") == {404}
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "a"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert listed(client) == {("outrider-demo-small", "mine")}
    (text,) = texts(client, "mine")
    again = {"lora_name": "mine", "lora_path": "b"}
    assert client.post("/v1/load_lora_adapter", json=again).status_code == 400
    assert client.post("/v1/load_lora_adapter", json={**again, "load_inplace": True}).status_code == 200
    (other,) = texts(client, "mine")
    assert len({text, other, *texts(client, "outrider-demo-small")}) == 3
    unloaded = client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'mine' removed successfully.",
    )
    assert statuses(client, "mine") == {404}
    assert listed(client) == {("outrider-demo-small",)}
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "mine"}).status_code == 404


def test_service_refuses_a_path_outside_of_its_folder(client: httpx.Client) -> None:
    asked = {"lora_name": "x", "lora_path": "../../etc"}
    refused = client.post("/v1/load_lora_adapter", json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert (
        "adapters.x='../../etc': it must lie in target.adapter_folder=" in refused.json()["error"]["message"]
    )
    assert listed(client) == {("outrider-demo-small",)}
