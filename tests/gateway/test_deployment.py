"""Gateway as Serve builds it and ends it."""

import re
import sys
from contextlib import AsyncExitStack
from types import SimpleNamespace

import httpx
import pytest

from gateway import deployment
from gateway.api import http_api
from gateway.api.access import Authentication
from gateway.api.openai.chat_template import ChatTemplate
from gateway.deployment import Gateway
from gateway.generation.generation import Generation
from gateway.generation.vocabulary import load_tokenizer
from gateway.settings import GatewaySettings, Speculation
from gateway.workers.fleet import Fleet
from outrider.demo.prompts import DEMO
from outrider.drafters.registry import drafter
from outrider.pace.settings import PaceSettings
from protos.trust import Trust

TRUST = Trust(token="the token of a test")
PACE = PaceSettings()


class Unserved(Gateway):
    def __del__(self):
        """Stands in for the destructor, which Serve awaits and no test does."""


async def test_gateway_failed_constructor_has_a_harmless_destructor():
    """Serve calls both by name: an error of the destructor would hide that of the constructor."""
    ended = []
    gateway = Unserved.__new__(Unserved)
    settings = GatewaySettings(model="m", tokenizer="no such tokenizer")
    with pytest.raises(Exception, match="no such tokenizer"):
        Unserved.__init__(gateway, settings, TRUST, lambda: lambda: ended.append(True), [], PACE)
    await Gateway.__del__(gateway)
    assert ended == [True]


async def test_gateway_failed_tracing_hides_no_error():
    def start_tracing():
        raise ValueError("no such exporter")

    gateway = Unserved.__new__(Unserved)
    with pytest.raises(ValueError, match="no such exporter"):
        Unserved.__init__(gateway, GatewaySettings(model="m", tokenizer="t"), TRUST, start_tracing, [], PACE)
    await Gateway.__del__(gateway)


async def test_gateway_sampling_defaults_come_from_the_checkpoint(tmp_path, monkeypatch):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((DEMO / "target" / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    monkeypatch.setattr(deployment, "Instruments", lambda *_: [])  # Ray's instruments need Ray
    gateway = Unserved.__new__(Unserved)
    settings = GatewaySettings(model="m", tokenizer=str(tmp_path))
    Unserved.__init__(gateway, settings, TRUST, lambda: lambda: None, [], PACE)
    gateway._publishing.cancel()
    assert gateway.generation.sampling_defaults == {"temperature": 0.6}
    await Gateway.__del__(gateway)


def gateway_of(settings):
    """Returns a gateway as Serve has built it."""
    gateway = Unserved.__new__(Unserved)
    gateway.generation = Generation(settings, load_tokenizer(settings.tokenizer), Fleet(list, TRUST))
    gateway._leaving, gateway._joined = AsyncExitStack(), {}
    return gateway


def test_reconfigure_with_a_new_draft_opens_its_handle_once(monkeypatch):
    looked_for = []

    class Handle:
        def __init__(self, deployment, application):
            self._names = deployment, application

        def options(self):
            looked_for.append(self._names)

    monkeypatch.setitem(sys.modules, "ray.serve.handle", SimpleNamespace(DeploymentHandle=Handle))
    gateway = gateway_of(GatewaySettings(model="m", tokenizer=str(DEMO / "target")))
    for drafts in ({"next": "model"}, {"next": "model", "third": "parallel"}, {}, {"next": "model"}):
        gateway.reconfigure({"drafts": drafts, "max_depth": 5})
    assert looked_for == [("draft-next", "next"), ("draft-third", "third")]
    assert gateway.generation.settings.new_drafts == ("next",)
    gateway.reconfigure({"drafts": {"model": "model"}, "max_depth": 6})
    told = gateway.generation.refused_live
    assert told == "user_config.drafts.model has the name of something else: give the draft another"
    assert gateway.generation.settings.new_drafts == ("next",)
    assert gateway.generation.paces.settings == PaceSettings(max_depth=5)


def test_reconfigure_with_a_pace_uses_it_unless_it_is_wrong():
    gateway = gateway_of(GatewaySettings(model="m", tokenizer=str(DEMO / "target")))
    paces = gateway.generation.paces
    pace = paces.of_target("some target")
    sequence = paces.sequence(drafter("model"), Speculation(depth=4), None, "interactive")
    pace.join(sequence)
    gateway.reconfigure({"policy": "thresholds", "off_below": 0.0, "on_above": 0.0})
    pace.refresh()
    with_drafts = pace.depth(sequence)
    gateway.reconfigure({"policy": "thresholds", "max_depth": 0})
    pace.refresh()
    assert (with_drafts > 0, pace.depth(sequence)) == (True, 0)
    gateway.reconfigure({"off_from": -1})
    assert paces.settings == PaceSettings(policy="thresholds", max_depth=0)


@pytest.mark.parametrize(
    ("user_config", "told"),
    [
        ({"max_dept": 2}, "user_config.max_dept=2 is no live setting: max_depth is one"),
        ({"exploration": 7}, "user_config.exploration=7: Input should be less than or equal to 1"),
        (
            {"drafts": {"next": "eagle3"}},
            "user_config.drafts.next='eagle3': Value error, 'eagle3' is not loaded by",
        ),
        (
            {"drafters": ["nobody"]},
            r"user_config.drafters=\['nobody'\]: there is no drafter 'nobody'; there are: ",
        ),
        ({"off_below": 0.9}, "user_config={'off_below': 0.9}: .*on_above must be at least off_below"),
        ("max_depth: 2", "user_config='max_depth: 2': Input should be a valid dictionary"),
    ],
)
def test_reconfigure_with_a_wrong_live_setting_names_it_and_keeps_what_was_in_force(
    user_config, told, caplog
):
    """An exception would make Serve end the replica, and every replica that it starts instead."""
    gateway = gateway_of(GatewaySettings(model="m", tokenizer=str(DEMO / "target")))
    gateway.reconfigure({"max_depth": 3})
    gateway.reconfigure(user_config)
    assert gateway.generation.paces.settings == PaceSettings(max_depth=3)
    assert re.match(told, gateway.generation.refused_live)
    assert gateway.generation.refused_live in caplog.text
    gateway.reconfigure({"max_depth": 4})
    assert (gateway.generation.paces.settings.max_depth, gateway.generation.refused_live) == (4, None)


async def test_health_with_refused_live_settings_says_why():
    gateway = gateway_of(GatewaySettings(model="m", tokenizer=str(DEMO / "target")))
    app = http_api.build(gateway.generation, ChatTemplate(None, {}), Authentication((), anonymous=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert "refused_live_settings" not in (await client.get("/health")).json()
        gateway.reconfigure({"max_dept": 2})
        told = (await client.get("/health")).json()["refused_live_settings"]
    assert told == gateway.generation.refused_live
