"""The process of an engine has the files of its model before it loads them."""

import socket

import pytest

from actors import engine_main
from actors.connection import Connection
from actors.messages import StartEngine, decode_to_engine
from actors.place import place_of
from actors.watchdog import loading
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings


def test_build_writes_the_demo_target_out_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that did not start the service may lack it."""
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(engine_main, "write_out", lambda model: done.append(("written", model)))
    monkeypatch.setattr(Engine, "from_settings", lambda settings: done.append(("loaded", settings.model)))
    settings = EngineSettings(model="model", device="cpu", threads=1)
    frontend_end, engine_end = socket.socketpair()
    with frontend_end, engine_end, loading(60.0, pytest.fail) as load:
        connection = Connection(engine_end, decode_to_engine)
        engine_main._build(StartEngine(settings, None), connection, place_of(settings, 0), load)
    assert done == [("written", "model"), ("loaded", "model")]
