"""The part of `python -m bench drafters` that starts services: drafters under the pace, asked over gRPC.

Plain decoding has a turn before and after each of them, since a shared machine is not always as fast.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from bench.checkpoints import DRAFT, inflated_head, inflated_input_of, inflated_target
from bench.streams import Client, Slice, slice_of
from outrider.demo.prompts import DRAFTERS, prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.support.running import serving

PROMPTS = 4  # of each kind, all of them in the workers' caches before anything is measured
ANSWER = 64  # tokens
OTHERS = 1000  # requests from one number of streams to the next: no past answer holds what is asked then
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Served:
    """A deployment beside the same target, and the drafters that requests to it can name."""

    settings: Mapping[str, object]
    named: Mapping[str, str]  # by drafter of the bench


@dataclass(frozen=True)
class Windows:
    """Seconds of each drafter at each number of streams."""

    warm_s: float  # in which the pace learns
    counted_s: float


OF_PLAIN = Windows(warm_s=2.0, counted_s=6.0)


def _model(name: str, folder: Path) -> dict[str, object]:
    given = {"model": folder, "dtype": "float32", "threads": 1}
    return {f"drafts.{name}.{setting}": value for setting, value in given.items()}


def _beside(drafter: str, size: str, **settings: object) -> dict[str, object]:
    given = {"drafter": drafter, "head": inflated_head(drafter, size).resolve(), **settings}
    return {f"target.{setting}": value for setting, value in given.items()}


def served(size: str, exit_after: int) -> Iterator[Served]:
    """exit_after: layers of the demo target."""
    drafts = _model("model", DRAFT) | _model("masks", DRAFTERS / "parallel")
    in_gateway = {name: name for name in ("ngram", "suffix", "model+suffix")}
    yield Served(drafts, {"model": "model", "parallel": "masks", **in_gateway})
    for drafter in ("eagle3", "medusa"):
        yield Served(_beside(drafter, size), {drafter: drafter})
    layers = inflated_input_of(exit_after, size)
    yield Served(_beside("early_exit", size, early_exit=layers), {f"exit after {exit_after}": "early_exit"})


def rows_of(
    service: Served, size: str, kinds: Sequence[str], streams: Sequence[int], windows: Windows
) -> list[dict[str, Any]]:
    """Of each drafter at each number of streams."""
    target = {"target": inflated_target(size).resolve(), "target.dtype": "float32", "target.threads": 1}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), {**target, **service.settings}) as running,
    ):
        return asyncio.run(_measured(running.direct, service.named, kinds, streams, windows))


async def _measured(
    address: str,
    named: Mapping[str, str],
    kinds: Sequence[str],
    streams: Sequence[int],
    windows: Windows,
) -> list[dict[str, Any]]:
    rows = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        for number in range(PROMPTS * len(kinds)):
            await stub.Complete(request(kinds, None, number, tokens=1))
        for count in streams:
            before = await _answers(stub, partial(request, kinds, None), count, OF_PLAIN)
            for name, drafter in named.items():
                done = await _answers(stub, partial(request, kinds, drafter), count, windows)
                after = await _answers(stub, partial(request, kinds, None), count, OF_PLAIN)
                rows.append(
                    {
                        "drafter": name,
                        "streams": count,
                        "tokens/s": done.rate,
                        "plain, tokens/s": (before.rate + after.rate) / 2,
                        "tokens per pass": done.rate * windows.counted_s / max(done.passes, 1),
                        "share of passes with a Draft": done.rounds / max(done.passes, 1),
                    }
                )
                before = after
    return rows


async def _answers(
    stub: Any, asked: Callable[[int, int], generation_pb2.GenerateRequest], streams: int, windows: Windows
) -> Slice:
    """Of the counted seconds."""
    client = Client(stub, asked, ANSWER, OTHERS * streams)
    start = windows.warm_s + await client.follow([(windows.warm_s + windows.counted_s, streams)])
    return slice_of(client.answers, start, start + windows.counted_s)


def request(
    kinds: Sequence[str], drafter: str | None, number: int, tokens: int
) -> generation_pb2.GenerateRequest:
    """Kinds take turns, and then prompts. drafter: None: plain decoding."""
    turn, kind = divmod(number, len(kinds))
    return generation_pb2.GenerateRequest(
        text=prompts(kinds[kind], PROMPTS)[turn % PROMPTS],
        task=f"{kinds[kind]}, {drafter}",  # no drafter sees past answers that another was asked for
        speculation=generation_pb2.SpeculationSettings(mode="auto" if drafter else "off", drafter=drafter),
        sampling=generation_pb2.Sampling(
            temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True, seed=number
        ),
    )
