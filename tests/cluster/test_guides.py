"""What a guide says to run works as it stands there, on the demo pair, and prints what is shown.

The services that it starts listen on their usual ports.
"""

from pathlib import Path

import pytest

from tests.support.guides import DOCS, GUIDES, commands, terminal


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_guides_commands_print_what_it_shows(name: str, tmp_path: Path) -> None:
    with terminal(tmp_path) as shell:
        for command in commands((DOCS / name).read_text()):
            shell.run(command)
