"""Measures what a head that does not draft costs plain decoding: `python -m bench idle_head`.

The demo target at 190 M parameters in float32, with its EAGLE-3 head and without. Two engines decode the same
sequences plainly and take their steps in turns, so that whatever else the machine does slows both. Time is
the processor's, of one thread.
"""

import statistics
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from bench.engine import CACHE_BYTES, requests_of
from bench.report import parser_of, save, table
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.offline.speculate import OfflineRequest
from outrider.engine.settings import EngineSettings, TargetDrafterSettings
from outrider.engine.work import plain_decoding

HEAD = "eagle3"
STREAMS = (1, 8)
KINDS = ("code", "prose", "json", "arithmetic")
PROMPT_TOKENS = 32  # at most: one step reads all prompts


class PlainDecoding:
    """Sequences of one engine that decode plainly, after the step that reads their prompts."""

    def __init__(self, engine: Engine, requests: Sequence[OfflineRequest]) -> None:
        self._engine = engine
        self._sequences = []
        for request in requests:
            sequence = engine.open(len(request.prompt), request.noise_key, request.sampling)
            tokens = request.sampling.max_tokens
            engine.submit(plain_decoding(sequence.number, 0, request.prompt, tokens))
            self._sequences.append(sequence)
        engine.step()
        self.seconds = 0.0

    def step(self) -> None:
        """Takes a step and adds its seconds."""
        started = time.process_time()
        self._engine.step()
        self.seconds += time.process_time() - started

    def close(self) -> None:
        for sequence in self._sequences:
            self._engine.close(sequence)


def engines() -> list[Engine]:
    """Returns an engine without the head and one with it, over the same weights and the same cache.

    Weights that lie elsewhere in memory may take a tenth more time or less.
    """
    target = written_out.target()
    written_out.write_out(str(target))
    settings = EngineSettings(
        model=str(target),
        dtype="float32",
        threads=1,
        cache_memory=CACHE_BYTES,
        drafters={HEAD: TargetDrafterSettings(checkpoint=str(target.with_name(HEAD)))},
    )
    drafters = TargetDrafters.of(settings)
    forward = load_forward_pass(settings, drafters=drafters)
    alone = copy(forward)
    alone._hidden_layers, alone._decoder = (), alone._decoder_of(alone.model, ())
    return [Engine(ModelRunner(alone, None)), Engine(ModelRunner(forward, None), drafters)]


def measure(tokens: int, repetitions: int) -> list[dict[str, Any]]:
    """Returns a row for each number of streams; ratios are medians over kinds of text and repetitions."""
    of_both = engines()
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    rows = []
    for streams in STREAMS:
        seconds: list[list[float]] = []
        for kind in KINDS * repetitions:
            requests = [
                replace(request, prompt=request.prompt[:PROMPT_TOKENS])
                for request in requests_of(kind, tokenizer, streams, tokens, 0.7)
            ]
            both = [PlainDecoding(engine, requests) for engine in of_both]
            for _ in range(tokens - 1):
                for decoding in both:
                    decoding.step()
            for decoding in both:
                decoding.close()
            seconds.append([decoding.seconds for decoding in both])
        of_each = [statistics.median(each) / (tokens - 1) * 1e3 for each in zip(*seconds, strict=True)]
        rows.append(
            {
                "streams": streams,
                "ms": of_each[0],
                "ms with the head": of_each[1],
                "ratio": statistics.median(with_head / without for without, with_head in seconds),
            }
        )
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("idle_head", __doc__)
    parser.add_argument("--tokens", type=int, default=65, help="tokens of an answer")
    parser.add_argument("--repetitions", type=int, default=1)
    options = parser.parse_args(arguments)
    rows = measure(options.tokens, options.repetitions)
    print(table(rows))
    print(save("idle_head", rows, threads=1))
