"""How commands about a deployment end."""

import os

import pytest

from outrider.cli.deployment import run_command
from outrider.cli.service import INTERRUPTED
from outrider.engine.errors import UnsupportedModelError


def raising(error: BaseException) -> None:
    raise error


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the variables of this process as they are."""
    monkeypatch.setattr(os, "environ", dict[str, str]())


@pytest.mark.parametrize("error", [ValueError("wrong"), OSError("wrong"), UnsupportedModelError("wrong")])
def test_run_command_of_a_known_error_prints_no_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(lambda: raising(error)) == 1
    assert capsys.readouterr().err == "outrider: wrong\n"


def test_run_command_of_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(lambda: raising(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_run_command_bounds_how_long_threads_spin() -> None:
    spins = list[str]()
    run_command(lambda: spins.append(os.environ["GOMP_SPINCOUNT"]))
    assert spins == ["5000"]


def test_run_command_of_an_unknown_error_raises_it() -> None:
    with pytest.raises(RuntimeError):
        run_command(lambda: raising(RuntimeError()))
    assert run_command(lambda: None) == 0
