"""Measures other servers beside ours, on anybody's machine: `python -m bench peers`."""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    from bench.peers.compare import main as compare  # peers import this package too, without our libraries

    compare(arguments)
