"""How commands about a deployment end."""

import pytest

from outrider.cli.deployment import run_or_say_why
from outrider.cli.service import INTERRUPTED
from outrider.engine.errors import UnsupportedModelError


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("wrong"), OSError("wrong"), UnsupportedModelError("wrong")])
def test_what_is_wrong_is_said_without_a_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_or_say_why(lambda: raising(error)) == 1
    assert capsys.readouterr().err == "outrider: wrong\n"


def test_ctrl_c_ends_it_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_or_say_why(lambda: raising(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr().err == ""


def test_what_nobody_foresaw_is_not_hidden() -> None:
    with pytest.raises(RuntimeError):
        run_or_say_why(lambda: raising(RuntimeError()))
    assert run_or_say_why(lambda: None) == 0
