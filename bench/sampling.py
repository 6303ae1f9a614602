"""What processing the logits, keyed noise and the choice cost per step: `python -m bench sampling`.

Yardstick: the time to read the weights of a 190 M target once, in turns with the choices, by summing a buffer
of that size. A one-token step of that target takes longer still, so the shares shown are upper bounds.
Logits are normal with a standard deviation of 4, which at 128,256 tokens leaves a few dozen likely ones.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.report import save, table
from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.sampling import choose, process
from outrider.decoding.settings import Sampling

NUM_ROWS = (1, 5, 32)
VOCAB_SIZES = (2048, 32_000, 128_256)
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 1": Sampling(),
    "temperature 0.8": Sampling(temperature=0.8),
    "top-k 50": Sampling(top_k=50),
    "top-p 0.9": Sampling(top_p=0.9),
    "all": Sampling(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={7: 1.0},
        bad_token_ids=(3,),
        min_tokens=1000,
        max_tokens=2000,
    ),
}
WEIGHT_BYTES = 763_000_000  # linear layers of the demo target inflated to 190 M, float32
STANDARD_DEVIATION = 4.0


def measure(repetitions: int) -> list[dict[str, Any]]:
    """A row per setting, vocabulary and number of rows; times are medians."""
    weights = torch.ones(WEIGHT_BYTES // 4)
    measured = []
    for vocab_size in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            generator = torch.Generator().manual_seed(num_rows)
            logits = torch.randn(num_rows, vocab_size, generator=generator) * STANDARD_DEVIATION
            for name, sampling in SETTINGS.items():
                rows = _rows(sampling, num_rows, vocab_size)
                chosen, read = [], []
                for _ in range(repetitions):
                    read.append(_seconds(weights.sum))
                    chosen.append(_seconds(partial(_choose, logits, rows)))
                measured.append(
                    {
                        "vocabulary": vocab_size,
                        "rows": num_rows,
                        "settings": name,
                        "ms": statistics.median(chosen) * 1e3,
                        "% of reading 190 M": statistics.median(chosen) / statistics.median(read) * 100,
                    }
                )
    return measured


def _rows(sampling: Sampling, num_rows: int, vocab_size: int) -> list[ChoiceContext]:
    """The positions of one Draft, after a prompt of 1,000 tokens and 200 generated ones."""
    prompt = [token * 37 % vocab_size for token in range(1000)]
    generated = [token * 53 % vocab_size for token in range(200)]
    ends = frozenset({0, 1})
    return [
        ChoiceContext(
            sampling, 2**63 + 1, 1200 + reached, prompt, generated, tuple(range(2, 2 + reached)), ends
        )
        for reached in range(num_rows)
    ]


def _choose(logits: torch.Tensor, rows: Sequence[ChoiceContext]) -> torch.Tensor:
    return choose(process(logits, rows), rows)


def _seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench sampling", description="What choosing tokens costs."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = measure(options.repetitions)
    print(table(rows))
    print(save("sampling", rows))
