"""Compares other servers with Outrider on any machine: `python -m bench peers`."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    from bench.peers.compare import main as compare  # late: peers import this package without our libraries

    compare(arguments)
