"""A draft changed under traffic, by deploying again: whoever asks notices nothing."""

import itertools
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.access import TOKEN
from gateway.routing.tuning import TUNING
from outrider.demo.prompts import DEMO, prompts
from tests.support.machines import Machines, deploy_again, deployed, raylets
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.served import CACHE
from tests.support.two_machines import gateways

pytestmark = pytest.mark.slow

# Costly enough that Drafts pay beside the traffic of this test on two cores.
DEEPER = 12
KINDS, EACH, STREAMS, TASK = ("json", "code", "stories"), 4, 3, "t"


def write_deeper(folder: Path) -> None:
    """The demo target with DEEPER times its layers: after each come some that add nothing."""
    shutil.copytree(DEMO / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] *= DEEPER
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        before, is_layers, after = name.partition(".layers.")
        if not is_layers:
            weights[name] = weight
            continue
        number, _, part = after.partition(".")
        adds = part in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for more in range(DEEPER):
            layer = f"{before}.layers.{int(number) * DEEPER + more}.{part}"
            weights[layer] = torch.zeros_like(weight) if adds and more else weight.clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target that costs more than the demo's and says the same, its draft, and one that is always wrong."""
    folder = tmp_path_factory.mktemp("models")
    write_deeper(folder / "target")
    shutil.copytree(DEMO / "draft", folder / "wrong")
    weights = load_file(folder / "wrong" / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = weights[name].roll(1, 0).contiguous()  # it says the neighbours of what it should
    save_file(weights, folder / "wrong" / "model.safetensors", {"format": "pt"})
    return {"target": f"{folder}/target", "wrong": f"{folder}/wrong", "right": f"{DEMO}/draft"}


def draft(name: str, model: str) -> dict[str, Any]:
    given = {"model": model, "dtype": "float32", "cache_memory": CACHE}
    return {f"drafts.{name}.{field}": value for field, value in given.items()}


def applications(models: dict[str, str], joined: dict[str, str], **live: Any) -> list[dict[str, Any]]:
    """joined: models of drafts by name, each an application of its own."""
    settings = {
        "target.model": models["target"],
        "access.require_keys": False,
        "target.dtype": "float32",
        "target.threads": 1,
        "target.cache_memory": CACHE,
        **draft("model", models["wrong"]),
    }
    drafts = dict.fromkeys(joined, "model")
    service = {
        "name": "default",
        "route_prefix": "/",
        "import_path": "cluster.app",
        "args": settings,
        "deployments": [{"name": "gateway", "user_config": {"exploration": 1.0, "drafts": drafts, **live}}],
    }
    beside = [
        {
            "name": name,
            "route_prefix": None,
            "import_path": "cluster.draft",
            "args": {**settings, "joins": name, **draft(name, model)},
        }
        for name, model in joined.items()
    ]
    return [service, *beside]


class Traffic:
    """The same requests again and again, each of which has one right answer."""

    def __init__(self, machines: Machines) -> None:
        self._url = f"{machines.http}/v1/completions"
        bodies = [
            {
                "prompt": prompt,
                "max_tokens": 64,
                "temperature": (0.0, 0.8)[number % 2],
                "seed": number,
                "task": TASK,
            }
            for number, prompt in enumerate(itertools.chain(*(prompts(kind, EACH) for kind in KINDS)))
        ]
        self._asked = [(body, self._answer(body, {"mode": "off"})[0]) for body in bodies]
        self._ends = threading.Event()
        self.answers = 0
        self.wrong: list[str] = []
        self.drafted_by = Counter[str]()  # rounds by drafter

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(first,)) for first in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def _run(self, first: int) -> None:
        for body, expected in itertools.islice(itertools.cycle(self._asked), first, None):
            if self._ends.is_set():
                return
            try:
                text, usage = self._answer(body, {"mode": "auto"})
            except (httpx.HTTPError, AssertionError) as error:
                self.wrong.append(repr(error))
                continue
            self.answers += 1
            for drafter, counts in usage["drafted_by"].items():
                self.drafted_by[drafter] += counts["rounds"]
            if text != expected:
                self.wrong.append(f"{body}: {text!r} is not {expected!r}")

    def _answer(self, body: dict[str, Any], speculation: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        response = httpx.post(
            self._url, json={**body, "speculation": {**speculation, "report": True}}, timeout=START_S
        )
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["choices"][0]["text"], answer["usage"]["speculation"]


def rollout(machines: Machines, name: str) -> dict[str, Any]:
    """How far the draft has come with the requests of this test; empty before the first of them."""
    told = httpx.get(f"{machines.http}/loads", timeout=LIMIT_S).json()["rollouts"]
    return next((rollout for rollout in told if (rollout["draft"], rollout["task"]) == (name, TASK)), {})


def pids(machines: Machines, name: str) -> set[int]:
    """Returns the process ids of a draft's workers."""
    return {worker["pid"] for worker in machines.workers("draft") if worker["draft"] == name}


def test_draft_is_rolled_out_under_traffic_lost_and_replaced(
    tmp_path: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "of the workers in this test")
    of_other_services = {process.pid for process in gateways()}
    with (
        raylets(num_cpus=4) as cluster,
        deployed(tmp_path, cluster, applications(models, {})[0]) as machines,
    ):

        def lasting() -> set[int]:
            ours = {process.pid for process in gateways()} - of_other_services
            return ours | machines.pids("target") | pids(machines, "model")

        machines.wait_for("draft", 1)
        traffic = Traffic(machines)
        stay = lasting()
        assert len(stay) == 3
        with traffic.running():
            _a_better_one_takes_over_though_it_is_killed(tmp_path, machines, models)
            assert traffic.drafted_by["next"] > 0
            _a_worse_one_never_drafts(tmp_path, machines, models)
            assert traffic.drafted_by["worse"] == 0
            _both_leave(tmp_path, machines, models)
            answers = traffic.answers
            wait_until(lambda: traffic.answers > answers + 2 * STREAMS, START_S)
        print(f"{traffic.answers} answers, rounds by drafter: {dict(traffic.drafted_by)}")
        assert traffic.wrong == []
        assert lasting() == stay


def _a_better_one_takes_over_though_it_is_killed(
    folder: Path, machines: Machines, models: dict[str, str]
) -> None:
    deploy_again(folder, machines, applications(models, {"next": models["right"]}))
    wait_until(
        lambda: rollout(machines, "next").get("share"), START_S, lambda: str(rollout(machines, "next"))
    )
    (killed,) = pids(machines, "next")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: rollout(machines, "next")["changes"].get("0"), START_S)
    wait_until(lambda: pids(machines, "next") - {killed}, START_S)
    wait_until(
        lambda: rollout(machines, "next")["share"] == 1.0, START_S, lambda: str(rollout(machines, "next"))
    )
    changes = rollout(machines, "next")["changes"]
    print(f"changes of the better one: {changes}")
    assert changes.keys() == {"0", "0.125", "0.25", "0.5", "1"}
    assert changes["0.125"] > 1  # it began anew once its worker was back


def _a_worse_one_never_drafts(folder: Path, machines: Machines, models: dict[str, str]) -> None:
    joined = {"next": models["right"], "worse": models["wrong"]}
    deploy_again(folder, machines, applications(models, joined, drafters=["next"]))
    wait_until(
        lambda: rollout(machines, "worse").get("seen", 0) > 3 * TUNING.drafts,
        START_S,
        lambda: str(rollout(machines, "worse")),
    )
    told = rollout(machines, "worse")
    print(f"the worse one: {told}")
    assert (told["share"], told["changes"]) == (0.0, {})
    # Where nobody else's Drafts pay at the moment, both are worth what plain decoding gives.
    assert 0.0 < told["tokens_per_second"] <= told["others_tokens_per_second"]
    assert not rollout(machines, "next")  # it is not new any more


def _both_leave(folder: Path, machines: Machines, models: dict[str, str]) -> None:
    deploy_again(folder, machines, applications(models, {}))
    wait_until(lambda: {worker["draft"] for worker in machines.workers("draft")} == {"model"}, START_S)
    assert httpx.get(f"{machines.http}/loads", timeout=LIMIT_S).json()["rollouts"] == []
