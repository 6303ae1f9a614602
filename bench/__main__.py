"""The one front of the benchmarks: `python -m bench NAME` runs one, `python -m bench` all in turn."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence

from tests.support.running import end_with_this_process

BENCHMARKS = {
    "start": "from the command to the first answer, and the memory of every process",
    "sampling": "noise and sampling per step",
    "linear": "the linear layers beside reading their weights",
    "step": "one forward pass: cost by tokens, overhead",
    "tensor_parallel": "a step of two processes beside one",
    "shared_head": "a Draft by a head that is whole in one process, and by one that two share",
    "plain": "plain decoding beside transformers' generate",
    "engine": "plain and speculative decoding in one process",
    "service": "a round's overhead, and the service beside one process",
    "host": "the service beside its own engine, and what each of its processes spends on a token",
    "transport": "what could carry messages between a front and its engine",
    "wire": "messages between gateway and target: a stream for each sequence, or one for all",
    "load": "the running service by load: plain, fixed depths, the pace (20 minutes, four cores)",
    "ahead": "draft-ahead and without, where a round's time goes (20 minutes, four cores)",
    "tracing": "what tracing every request costs at 16 streams",
    "plots": "pictures of these two",
    "simulate": "the gateway and its pace at GPU cost ratios",
    "parallel": "parallel drafts at GPU cost ratios",
    "beside": "a head beside the target, and parallel drafts, at GPU cost ratios",
    "early": "rounds that are launched early, at GPU cost ratios",
    "routing": "several drafts, the best for each task, at GPU cost ratios",
    "suffix": "drafters without a model: tokens per pass by kind of text",
    "drafters": "every drafter: acceptance, tokens per pass, cost of a Draft, speed (20 minutes, two cores)",
    "trees": "heads that draft trees: tokens per pass by kind of text and nodes beside the chain",
    "layerskip": "a target that was trained to be left early, and one that was not (10 minutes)",
    "distil": "the demo draft fitted to a kind of text that it never saw, and what becomes of the old kinds",
    "advise": "what outrider advise foretells beside what is measured",
    "metrics": "what recording metrics costs",
    "quantized": "8 and 4 bit drafts: cost of a step, acceptance",
    "identity": "same seed, same text: how many requests differ",
    "structured": "JSON by schema: the cost of masks, and what grammars and Drafts bring together",
    "checking": "what `outrider check` finds of planted defects, and how much it asks for that",
    "batch_invariant": "what batch-invariant numerics cost",
    "tables": "the tables of all these in the docs",
}
ALONE = {  # not among those that are run in turn
    "gpu": "the engine on a GPU, which it needs",
    "peers": "other servers beside ours, each installed first (5 GB)",
    "inflate": "writes a Llama checkpoint that computes the same function at a larger cost",
}


def main(arguments: Sequence[str]) -> None:
    """Only the module of the benchmark that runs is imported; in turn each has a process of its own."""
    every = BENCHMARKS | ALONE
    listed = "\n".join(f"  {name:17}{title}" for name, title in every.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="%(prog)s [-h] [NAME [OPTION ...]]",
        description=f"All benchmarks in turn, without {' and '.join(ALONE)}; or one with its options.",
        epilog=f"NAME is one of\n{listed}\nIts own options: python -m bench NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", choices=every, metavar="NAME", help="of a benchmark")
    name = parser.parse_args(arguments[:1]).name
    if name is None:
        run_all()
    else:
        importlib.import_module(f"bench.{name}").main(arguments[1:])


def run_all() -> None:
    """Raises CalledProcessError at the first that fails."""
    for number, (name, title) in enumerate(BENCHMARKS.items(), start=1):
        print(f"\n[{number}/{len(BENCHMARKS)}] {name}: {title}", flush=True)
        command = [sys.executable, "-m", "bench", name]
        subprocess.run(command, check=True, preexec_fn=end_with_this_process)


if __name__ == "__main__":
    main(sys.argv[1:])
