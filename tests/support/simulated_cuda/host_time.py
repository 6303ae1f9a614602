"""Measures the host time of our Python code in a step: `python -m tests.support.simulated_cuda.host_time`

It prints CPU microseconds of a verifying step without torch and Triton, by sequences and tokens per sequence.
The process is in the steady state of a worker: Python has warmed up every path, and the garbage collector
skips loaded objects. On a real GPU, each launch and copy costs the host some microseconds more; Counts has
their number.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from triton.runtime.interpreter import InterpretedFunction

from actors.process import freeze_heap
from outrider.decoding.draft import ROOT, Draft
from outrider.decoding.settings import Sampling
from outrider.engine.forward import graphs
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.graphs import Event, Graph
from tests.support.simulated_cuda.install import simulated_cuda

SEQUENCES = (1, 8, 64, 256)
TOKENS = (1, 5)  # tokens per sequence: the last committed token, and drafted tokens
PROMPT_LENGTH = 9
ROUNDS = 4
WARM_UPS = 16  # rounds of one sequence; Python specializes a function after eight calls


class Apart:
    """Sums up the seconds of some functions; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, started = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - started
                self._is_inside = False

        return call


@contextmanager
def device_apart() -> Iterator[tuple[Any, Apart]]:
    """Yields a simulated device, and the sum of its own time: operations, kernels, replays and events."""
    apart = Apart()
    with ExitStack() as undo:
        cuda = undo.enter_context(simulated_cuda())
        places = [(type(cuda), "__torch_dispatch__"), (InterpretedFunction, "run"), (Graph, "replay")]
        places += [(Event, name) for name in ("record", "synchronize", "elapsed_time")]
        for owner, name in places:
            undo.enter_context(patch.object(owner, name, apart.timed(getattr(owner, name))))
        yield cuda, apart


def microseconds(engine: Engine, sequences: int, tokens: int, apart: Apart, rounds: int = ROUNDS) -> float:
    """Returns the host's shortest step in ``rounds`` rounds that verify ``tokens`` tokens per sequence."""
    sampling = Sampling(max_tokens=TOKENS[-1] * (1 + WARM_UPS), ignore_eos=True, temperature=0.7)
    opened = [engine.open(PROMPT_LENGTH, number, sampling) for number in range(sequences)]
    texts = {sequence.number: [3 + sequence.number % 50] * PROMPT_LENGTH for sequence in opened}
    draft = Draft(tuple(range(3, 2 + tokens)), tuple(range(ROOT, tokens - 2)))
    seconds = []
    for round in range(rounds + 1):
        for sequence in opened:
            base = len(sequence.tokens)
            new = tuple(texts[sequence.number][base:])
            engine.submit(Decode(sequence.number, base, new, draft if round else Draft(), round))
        apart.seconds, started, steps = 0.0, time.thread_time(), 0
        results = []
        while engine.has_work:
            results += engine.step()
            steps += 1
        seconds.append((time.thread_time() - started - apart.seconds) / steps)
        for result in results:
            assert isinstance(result, Decoded)
            texts[result.sequence] += result.verdict.tokens
    for sequence in opened:
        engine.close(sequence)
    return 1e6 * min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # The interpreter would take minutes for all graph sizes of a GPU.
    shapes = [(sequences, tokens) for sequences in arguments.sequences for tokens in TOKENS]
    rows = sorted({*TOKENS, *(sequences * tokens for sequences, tokens in shapes)})
    sizes = patch.multiple(graphs, CAPTURED_SIZES=(*rows,), LEAST_CHUNK=rows[-1] + 1)
    with sizes, device_apart() as (_, apart), tempfile.TemporaryDirectory() as folder:
        settings = EngineSettings(
            model=str(write_checkpoint(Path(folder), "llama", num_hidden_layers=1)),
            device="cuda",
            dtype="float16",
            cache_memory=2**24,
            prefill_chunk=2**12,
            max_sequences=max(SEQUENCES),
            self_check=False,
        )
        engine = Engine.from_settings(settings)
        freeze_heap()
        for tokens in TOKENS:
            microseconds(engine, 1, tokens, apart, WARM_UPS)
        for sequences, tokens in shapes:
            found = microseconds(engine, sequences, tokens, apart)
            print(f"{sequences:4d} x {tokens}: {found:7.0f} us of the host a step", flush=True)


if __name__ == "__main__":
    main()
