"""The tables of results in the docs and the README, from bench/results/*.json: `python -m bench tables`."""

import argparse
from collections.abc import Sequence

from bench.tables.pages import COMMAND, PAGES, updated


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog=COMMAND, description=__doc__).parse_args(arguments)
    for path in PAGES:
        path.write_text(updated(path.read_text()))
