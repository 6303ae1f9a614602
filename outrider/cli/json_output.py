"""``--json``: the figures of a command in machine-readable form."""

import argparse
import json
from pathlib import Path
from typing import Any

STDOUT = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--json``."""
    parser.add_argument(
        "--json",
        type=_json_file,
        metavar="FILE",
        help="file to write all figures to, *.json; -: the standard output, in place of the text",
    )


def print_or_write(text: str, figures: Any, file: Path | None) -> None:
    """Prints the text, and writes the figures to ``file`` if it is given. STDOUT gets only the figures.

    Raises:
        OSError: the file cannot be written.
    """
    if file != STDOUT:
        print(text, flush=True)
    if file is None:
        return
    written = json.dumps(figures, indent=1)
    if file == STDOUT:
        print(written, flush=True)
    else:
        file.write_text(written + "\n", encoding="utf-8")


def _json_file(text: str) -> Path:
    """Returns the file. Names without .json are refused: they may be settings that follow the option."""
    if text != str(STDOUT) and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r}: a name that ends in .json is accepted, or -")
    return Path(text)
