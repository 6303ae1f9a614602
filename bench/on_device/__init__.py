"""Benchmarks for a GPU that is available for minutes: figures are kept as they come, and time is bounded."""

import argparse
import importlib
from collections.abc import Sequence

SCRIPTS = ("wheels", "pair", "checks", "engine", "service", "failures", "keep")


def main(arguments: Sequence[str]) -> None:
    """Runs one of the scripts with its own options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench on_device", usage="%(prog)s [-h] SCRIPT [OPTION ...]"
    )
    parser.add_argument("script", choices=SCRIPTS)
    script = parser.parse_args(arguments[:1]).script
    importlib.import_module(f"bench.on_device.{script}").main(arguments[1:])
