"""Two drafts, each a deployment of its own, beside one target."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.patience import LIMIT_S, wait_until
from tests.support.running import serving
from tests.support.served import CACHE, SERVED

pytestmark = pytest.mark.slow

ASKED = {"prompt": '{"name": "', "max_tokens": 60, "temperature": 0.7, "seed": 7, "task": "json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    two = {
        "drafts.copy": json.dumps({"model": "target", "cache_memory": CACHE}),
        "pace.exploration": "1",
        "gateway.drafters": json.dumps(["model", "copy", "suffix"]),
    }
    with (
        serving(tmp_path_factory.mktemp("two drafts"), {**SERVED, **two}) as service,
        httpx.Client(base_url=service.http, timeout=LIMIT_S) as client,
    ):
        yield client


def answer(client: httpx.Client, **speculation: Any) -> tuple[str, dict[str, Any]]:
    response = client.post("/v1/completions", json={**ASKED, "speculation": {**speculation, "report": True}})
    body = response.json()
    assert response.status_code == 200, body
    return body["choices"][0]["text"], body["usage"]["speculation"]


def test_drafts_have_workers_with_their_names(client: httpx.Client) -> None:
    health = client.get("/health").json()
    assert {(worker["role"], worker["draft"]) for worker in health["workers"]} == {
        ("target", ""),
        ("draft", "model"),
        ("draft", "copy"),
    }
    assert {"model", "copy", "copy+suffix", "suffix"} <= health["drafters"].keys()


def test_drafts_all_give_the_same_text(client: httpx.Client) -> None:
    plain, _ = answer(client, mode="off")
    for name in ("model", "copy", "copy+suffix", "suffix"):
        text, usage = answer(client, mode="fixed", depth=4, drafter=name)
        assert text == plain
        assert usage["routed"] == {name: {"named": 1}}
        assert usage["drafted_by"].keys() <= {*name.split("+")}
    for _ in range(8):
        text, usage = answer(client)
        assert (text, usage["drafter"]) == (plain, "auto")
        assert usage["routed"].keys() <= {"model", "copy", "suffix"}


def test_drafts_that_do_not_draft_are_judged(client: httpx.Client) -> None:
    def of_auto() -> dict[str, Any]:
        answer(client)
        (found,) = (totals for totals in client.get("/loads").json()["tasks"] if totals["drafter"] == "auto")
        return dict(found)

    wait_until(lambda: "copy" in of_auto()["judged"])
    task = of_auto()
    assert task["judged"]["copy"]["reached"] >= task["judged"]["copy"]["correct"] > 0
    assert task["routed"]["model"]["times"]["first"] >= 1
