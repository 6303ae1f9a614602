"""Command of the benchmarks: `python -m bench NAME` runs one, `python -m bench` all in turn."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence

from tests.support.running import end_with_this_process

BENCHMARKS = {
    "step": "one forward pass: cost by tokens, or by numerics",
    "engine": "plain and speculative decoding in one process",
    "host": "the service beside its own engine, and what each of its processes spends on a token",
    "load": "the running service by load: plain, fixed depths, the pace (20 minutes, four cores)",
    "costs": "the model of a step's costs beside an H100's steps, and a round of a 70B",
    "simulate": "the gateway and its pace at GPU cost ratios",
    "mixture": "the pace's choice for a mixture of experts and for a dense model, by streams, simulated",
    "identity": "same seed, same text: how many requests differ",
    "stalls": "gaps in streams while targets stall or are drained, with second targets and without",
    "tables": "the tables of all benchmarks in the docs",
}
ALONE = {  # benchmarks that are not run in turn
    "drafters": "target drafters by kind of text, and SPEED-Bench's shapes of load",
    "on_device": "what a GPU can show within minutes, the service too: a script for each",
    "peers": "other servers beside ours, each installed first (5 GB)",
}


def main(arguments: Sequence[str]) -> None:
    """Runs one benchmark in this process and imports only its module, or runs each in its own process."""
    every = BENCHMARKS | ALONE
    listed = "\n".join(f"  {name:17}{title}" for name, title in every.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="%(prog)s [-h] [NAME [OPTION ...]]",
        description=f"All benchmarks in turn, without {', '.join(ALONE)}; or one with its options.",
        epilog=f"NAME is one of\n{listed}\nIts own options: python -m bench NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=every, metavar="NAME", help="name of a benchmark")
    name = parser.parse_args(arguments[:1]).name
    if name is None:
        run_all()
    else:
        importlib.import_module(f"bench.{name}").main(arguments[1:])


def run_all() -> None:
    """Runs all benchmarks in turn. Raises CalledProcessError at the first failure."""
    for number, (name, title) in enumerate(BENCHMARKS.items(), start=1):
        print(f"\n[{number}/{len(BENCHMARKS)}] {name}: {title}", flush=True)
        command = [sys.executable, "-m", "bench", name]
        subprocess.run(command, check=True, preexec_fn=end_with_this_process)


if __name__ == "__main__":
    main(sys.argv[1:])
