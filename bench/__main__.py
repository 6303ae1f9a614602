"""`make bench`: every benchmark in turn, each in a process of its own, tables printed and saved."""

import subprocess
import sys

BENCHMARKS = {
    "start": "from the command to the first answer, and the memory of every process",
    "sampling": "noise and sampling per step",
    "linear": "the linear layers beside reading their weights",
    "step": "one forward pass: cost by tokens, overhead",
    "tensor_parallel": "a step of two processes beside one",
    "plain": "plain decoding beside transformers' generate",
    "engine": "plain and speculative decoding in one process",
    "service": "a round's overhead, and the service beside one process",
    "wire": "messages between gateway and target: a stream for each sequence, or one for all",
    "load": "the running service by load: plain, fixed depths, the pace (20 minutes, four cores)",
    "ahead": "draft-ahead and without, where a round's time goes (20 minutes, four cores)",
    "tracing": "what tracing every request costs at 16 streams",
    "plots": "pictures of these two",
    "simulate": "the gateway and its pace at GPU cost ratios",
    "metrics": "what recording metrics costs",
    "quantized": "8 and 4 bit drafts: cost of a step, acceptance",
    "identity": "same seed, same text: how many requests differ",
    "batch_invariant": "what batch-invariant numerics cost",
    "tables": "the tables of all these in the docs",
}


def main() -> None:
    for number, (name, title) in enumerate(BENCHMARKS.items(), start=1):
        print(f"\n[{number}/{len(BENCHMARKS)}] bench.{name}: {title}", flush=True)
        subprocess.run([sys.executable, "-m", f"bench.{name}"], check=True)


if __name__ == "__main__":
    main()
