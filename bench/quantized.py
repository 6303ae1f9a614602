"""Drafts with 8 and 4 bit weights beside the same in bfloat16: `python -m bench quantized`.

What a step costs, on the demo draft inflated to 150 M: steps of the three alternate, and ratios are medians
within a repetition. What is accepted, on the demo pair as it is: of the draft, and of the target's own copy.
The demo target judges in float32; every text has to be the plain one.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench.checkpoints import inflated_draft
from bench.engine import acceptance_rate
from bench.identity import requests
from bench.report import save, table
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.draft_model import DraftModel
from outrider.engine.offline.speculate import generate
from outrider.engine.settings import EngineSettings, Quantization
from workshop.advice.steps import Steps

WEIGHTS: tuple[Quantization | None, ...] = (None, "int8", "int4")
TOKENS = (1, 2, 5, 9, 17)  # of one sequence in one step; 17: a tree of draft-ahead
DEPTH = 4
AIM = 0.6  # of the step of one token in bfloat16


def engine(model: str, threads: int, quantization: Quantization | None, dtype: str = "bfloat16") -> Engine:
    fields = {"model": model, "threads": threads, "dtype": dtype, "quantization": quantization}
    return Engine.from_settings(EngineSettings.model_validate({**fields, "cache_memory": 2**28}))


def step_costs(threads: int, repetitions: int) -> list[dict[str, Any]]:
    """One row per kind of weights and number of tokens; milliseconds, and the ratio to bfloat16."""
    model = str(inflated_draft())
    engines = {weights: engine(model, threads, weights) for weights in WEIGHTS}
    rows = []
    for tokens in TOKENS:
        steps = {weights: Steps(engines[weights], 1, tokens) for weights in WEIGHTS}
        taken: dict[Quantization | None, list[float]] = {weights: [] for weights in WEIGHTS}
        for _ in range(repetitions + 1):  # the first warms up
            for weights in WEIGHTS:
                taken[weights].append(steps[weights].take())
        for weights, seconds in taken.items():
            ratios = [mine / plain for mine, plain in zip(seconds[1:], taken[None][1:], strict=True)]
            rows.append(
                {
                    "weights": weights or "bfloat16",
                    "tokens": tokens,
                    "ms": statistics.median(seconds[1:]) * 1e3,
                    "to bfloat16": statistics.median(ratios),
                }
            )
            steps[weights].close()
    return rows


def acceptance(threads: int, count: int, tokens: int) -> list[dict[str, Any]]:
    """One row per draft, over all kinds of text and temperatures 0, 0.7 and 1."""
    target = engine(str(DEMO / "target"), threads, None, "float32")
    asked = requests(count, tokens)
    plain = generate(target, None, asked, 0)
    rows = []
    for role in ("draft", "target"):
        for weights in WEIGHTS:
            drafter = DraftModel(engine(str(DEMO / role), threads, weights))
            outputs = generate(target, drafter, asked, DEPTH)
            passes = sum(output.target_passes for output in outputs)
            per_pass = sum(len(output.tokens) for output in outputs) / passes
            rows.append(
                {
                    "draft": "small" if role == "draft" else "the target's copy",
                    "weights": weights or "bfloat16",
                    "acceptance rate": acceptance_rate(per_pass, DEPTH),
                    "tokens / pass": per_pass,
                    "requests": count,
                    "differ": sum(a.tokens != b.tokens for a, b in zip(plain, outputs, strict=True)),
                }
            )
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench quantized", description="8 and 4 bit drafts.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = step_costs(options.threads, options.repetitions)
    print(table(rows))
    accepted = acceptance(options.threads, options.requests, options.tokens)
    print(table(accepted))
    best = min(row["to bfloat16"] for row in rows if row["tokens"] == 1)
    print(f"one token: {best:.2f} of bfloat16, aim {AIM}: {'met' if best <= AIM else 'missed'}")
    print(save("quantized", rows, acceptance=accepted, aim=AIM))
