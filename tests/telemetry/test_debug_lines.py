"""A developer switches on the debug lines of rooms by an environment variable."""

import ast
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.telemetry.debug_lines import ROOMS, show_debug_lines

ROOT = Path(__file__).parents[2]
Shown = Callable[[str], None]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Shows the lines of these rooms in a process whose root logger has no handler, as in a replica."""

    def show(rooms: str) -> None:
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(logging.Logger.manager, "loggerDict", {})
        monkeypatch.setenv(ROOMS, rooms)
        show_debug_lines()

    return show


def is_shown(name: str) -> bool:
    return logging.getLogger(name).isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize("name", ["ray.serve.gateway.routing.route", "outrider.pace.controller"])
def test_debug_lines_of_a_named_room_are_written(
    shown: Shown, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    shown(" gateway.routing , outrider.pace,")
    logging.getLogger(name).debug("seen %d", 7)
    assert f"{name}: seen 7\n" in capfd.readouterr().err


def test_debug_lines_of_other_rooms_are_not_written(shown: Shown) -> None:
    shown("gateway.routing")
    assert not is_shown("ray.serve.gateway.loop.loop")
    assert not is_shown("gateway")
    assert not is_shown("outrider.pace.controller")


def test_debug_lines_of_a_room_within_a_named_room_are_written_once(
    shown: Shown, capfd: pytest.CaptureFixture[str]
) -> None:
    shown("outrider.pace,outrider")
    logging.getLogger("outrider.pace.controller").debug("seen")
    assert capfd.readouterr().err.count("seen") == 1


def logger_names(path: Path) -> list[str]:
    """Returns the argument of each ``getLogger`` in a file, as source text."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).endswith("getLogger")]


@pytest.mark.slow
def test_loggers_have_the_names_of_their_modules() -> None:
    """Only so a room can be named. Serve's own logger, and this room, are the exceptions."""
    files = [
        path for room in ("outrider", "actors", "gateway", "cluster") for path in (ROOT / room).rglob("*.py")
    ]
    exceptions = {"gateway/api/refusals_log.py", "outrider/telemetry/debug_lines.py"}
    named = {"__name__", "f'ray.serve.{__name__}'"}
    others = {str(path.relative_to(ROOT)) for path in files if {*logger_names(path)} - named}
    assert others == exceptions
