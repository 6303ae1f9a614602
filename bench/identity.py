"""Counts how often the same seed gives the same text: `python -m bench identity`.

Seeded requests to the demo pair are answered one at a time by plain decoding, then in every other way. In
float32 no text should differ. In bfloat16, rounding depends on the shape of a step; the benchmark counts how
often that changes a text. With batch-invariant numerics no text may differ.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.report import parser_of, save, table
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.drafters.ngram import NgramIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.settings import EngineSettings

TEMPERATURES = (0.0, 0.7, 1.0)
PROMPTS = 40  # prompts per kind
BATCH = 32
# Values: drafter, depth, alternatives, requests at a time.
WAYS: dict[str, tuple[str | None, int, int, int]] = {
    "plain, batch 32": (None, 0, 0, BATCH),
    "draft model, chain of 4, alone": ("model", 4, 0, 1),
    "draft model, chain of 4, batch 32": ("model", 4, 0, BATCH),
    "draft model, chain of 3 and 3 alternatives, batch 32": ("model", 3, 3, BATCH),
    "n-gram, chain of 4, alone": ("ngram", 4, 0, 1),
}


def requests(count: int, tokens: int) -> list[OfflineRequest]:
    """Returns requests with all kinds of text and all temperatures, each with its own seed."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    made = []
    for seed in range(count):
        text = prompts(KINDS[seed % len(KINDS)], PROMPTS)[seed // len(KINDS) % PROMPTS]
        prompt = tuple(tokenizer.encode(text).ids)
        sampling = Sampling(temperature=TEMPERATURES[seed % 3], max_tokens=tokens, seed=seed)
        made.append(OfflineRequest(prompt, sampling, noise_key(seed, 0, prompt)))
    return made


def measure(dtype: str, batch_invariant: bool, count: int, tokens: int, threads: int) -> list[dict[str, Any]]:
    """Returns a row per way: the number of texts that differ from plain decoding one at a time."""

    def engine(role: str, **settings: Any) -> Engine:
        fields = {"model": str(DEMO / role), "dtype": dtype, "threads": threads, "cache_memory": 2**28}
        return Engine.from_settings(EngineSettings.model_validate({**fields, **settings}))

    target, draft = engine("target", batch_invariant=batch_invariant), engine("draft")
    asked = requests(count, tokens)

    def answers(name: str | None, depth: int, alternatives: int, at_once: int) -> list[Output]:
        drafters: dict[str | None, Drafter | None] = {
            None: None,
            "model": DraftModel(draft),
            "ngram": IndexDrafter(NgramIndex),
        }
        return [
            output
            for start in range(0, count, at_once)
            for output in generate(
                target, drafters[name], asked[start : start + at_once], depth, alternatives
            )
        ]

    reference = answers(None, 0, 1, 1)
    rows = []
    for way, settings in WAYS.items():
        outputs = answers(*settings)
        differing = sum(a.tokens != b.tokens for a, b in zip(reference, outputs, strict=True))
        numerics = {"dtype": dtype, "batch_invariant": batch_invariant}
        rows.append({**numerics, "way": way, "requests": count, "differ": differing})
        print(table(rows[-1:]), flush=True)
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("identity", __doc__)
    parser.add_argument(
        "--dtypes", nargs="*", default=["float32", "bfloat16"], help="types with usual numerics"
    )
    parser.add_argument(
        "--batch-invariant", nargs="*", default=["bfloat16"], help="types with batch-invariant numerics"
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = [
        row
        for batch_invariant, dtypes in ((False, options.dtypes), (True, options.batch_invariant))
        for dtype in dtypes
        for row in measure(dtype, batch_invariant, options.requests, options.tokens, options.threads)
    ]
    print(table(rows))
    print(save("identity", rows))
