"""``--json``: the figures of a command for another program."""

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
    """Prints the text, and writes the figures to the file if there is one; of STDOUT the figures alone.

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
    """Returns the file. Another name is refused: it may be a file of settings that came after the option."""
    if text != str(STDOUT) and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r}: a name that ends in .json is accepted, or -")
    return Path(text)
