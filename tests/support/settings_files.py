"""Settings from files and from arguments."""

from pathlib import Path
from typing import Any

from cluster.arguments import read_settings
from cluster.settings import Settings


def settings(**arguments: Any) -> Settings:
    """Returns the settings of arguments that are named by group."""
    return read_settings(arguments)


def in_a_file(folder: Path, text: str) -> str:
    """Writes settings to a file and returns its path."""
    file = folder / "outrider.yaml"
    file.write_text(text)
    return str(file)
