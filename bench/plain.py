"""Measures plain decoding beside transformers' `generate` on the same weights: `python -m bench plain`.

A Llama of 32 M random weights in float32, greedy, at batch 1, 8 and 32. The two alternate within one run;
the ratio is the median over the pairs.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.checkpoints import random_llama
from bench.peers.transformers_generate import padded
from bench.report import save, table
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding

PROMPT_TOKENS = 64
BATCHES = (1, 8, 32)


def engine_seconds(engine: Engine, prompts: list[list[int]], count: int) -> float:
    """Seconds to decode ``count`` tokens after every prompt, prefill included."""
    sampling = Sampling(temperature=0, max_tokens=count)
    started = time.perf_counter()
    sequences = [engine.open(len(prompt), 0, sampling) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.submit(plain_decoding(sequence.number, 0, tuple(prompt), count))
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - started
    for sequence in sequences:
        engine.close(sequence)
    return seconds


def generate_seconds(model: Any, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Returns the seconds of `generate` with its static batch."""
    token_ids, mask = padded(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            token_ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return time.perf_counter() - started


def measure(threads: int, count: int, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row per batch size: tokens per second of both, and their ratio."""
    path = random_llama()
    engine = Engine.from_settings(
        EngineSettings(model=str(path), dtype="float32", threads=threads, prefill_chunk=4096)
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch in BATCHES:
        pairs = []
        for repetition in range(repetitions + 1):
            prompts = torch.randint(8192, (batch, PROMPT_TOKENS), generator=generator).tolist()
            pair = engine_seconds(engine, prompts, count), generate_seconds(model, prompts, count)
            if repetition:  # the first warms up
                pairs.append(pair)
        tokens = batch * count
        rows.append(
            {
                "batch": batch,
                "outrider tokens/s": tokens / statistics.median(ours for ours, _ in pairs),
                "generate tokens/s": tokens / statistics.median(theirs for _, theirs in pairs),
                "ratio": statistics.median(theirs / ours for ours, theirs in pairs),
            }
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench plain", description="Plain decoding beside generate."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="decoded after every prompt")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    rows = measure(options.threads, options.tokens, options.repetitions)
    print(table(rows))
    print(save("plain", rows))
