"""The commands of docs/checking.md print what the page shows."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from outrider.tools.check_command import SAME
from outrider.tools.command_line import main

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "checking.md"
FIGURES = re.compile(r"[\d.,]+(?:e[+-]\d+)?")


def shape(text: str) -> list[str]:
    """Its headings, sentences and columns, without figures that another machine rounds otherwise."""
    lines = (FIGURES.sub("#", line) for line in text.splitlines() if "http://" not in line)
    return [line for line in lines if line]


async def test_the_command_shown_prints_what_is_shown(
    addresses: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    ((command, shown),) = re.findall(r"```\n\$ outrider (check .*)\n((?:.*\n)*?)```", PAGE.read_text())
    here = command.replace("http://127.0.0.1:8000", addresses[1])
    assert await asyncio.to_thread(main, shlex.split(here)) == SAME
    assert shape(capsys.readouterr().out) == shape(shown)
