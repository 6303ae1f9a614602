"""The part of `python -m bench drafters` that starts services: drafters under the pace, asked over gRPC.

Plain decoding has a turn before and after each of them on a kind of text, since a shared machine is not
always as fast.
"""

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.checkpoints import DRAFT, inflated_head, inflated_input_of, inflated_target
from bench.streams import Client, Slice, slice_of
from outrider.demo.prompts import DRAFTERS, prompts
from protos import generation_pb2, generation_pb2_grpc
from tests.support.running import serving

PROMPTS = 4  # of a kind, all of them in the workers' caches before anything is measured
ANSWER = 64  # tokens
OTHERS = 1000  # requests from one window to the next


@dataclass(frozen=True)
class Served:
    """A deployment beside the same target, and the drafters that requests to it can name."""

    settings: Mapping[str, object]
    named: Mapping[str, str]  # by drafter of the bench


@dataclass(frozen=True)
class Windows:
    """Seconds of what streams ask for."""

    warm_s: float  # in which the pace learns
    counted_s: float


OF_PLAIN = Windows(warm_s=1.0, counted_s=4.0)


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


@contextmanager
def running(service: Served, size: str) -> Iterator[str]:
    """The gateway's address while the service runs."""
    target = {"target": inflated_target(size).resolve(), "target.dtype": "float32", "target.threads": 1}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), {**target, **service.settings}) as started,
    ):
        yield started.direct


async def rows_of(
    address: str,
    name: str,
    drafter: str,
    kinds: Sequence[str],
    temperatures: Sequence[float],
    streams: Sequence[int],
    windows: Windows,
) -> list[dict[str, Any]]:
    """One for each kind, temperature and number of streams.

    Args:
        name: of the drafter in the bench.
        drafter: its name in requests.
    """
    rows = []
    async with grpc.aio.insecure_channel(address) as channel:
        asking = Asking(generation_pb2_grpc.GenerationStub(channel))  # type: ignore[no-untyped-call]
        for count in streams:
            for kind in kinds:
                await asking.prime(kind)
                before = await asking.answers(Asked(kind, None, temperatures[0]), count, OF_PLAIN)
                drafted = {
                    temperature: await asking.answers(Asked(kind, drafter, temperature), count, windows)
                    for temperature in temperatures
                }
                after = await asking.answers(Asked(kind, None, temperatures[0]), count, OF_PLAIN)
                rows += [
                    {
                        "drafter": name,
                        "kind": kind,
                        "temperature": temperature,
                        "streams": count,
                        "tokens/s": done.rate,
                        "plain, tokens/s": (before.rate + after.rate) / 2,
                        "to plain": 2 * done.rate / (before.rate + after.rate),
                        "tokens per pass": done.rate * windows.counted_s / max(done.passes, 1),
                        "share of passes with a Draft": done.rounds / max(done.passes, 1),
                    }
                    for temperature, done in drafted.items()
                ]
    return rows


@dataclass(frozen=True)
class Asked:
    """What streams ask for; drafter None: plain decoding."""

    kind: str
    drafter: str | None
    temperature: float

    def request(self, number: int, tokens: int) -> generation_pb2.GenerateRequest:
        """Prompts take turns, and the seed is the number."""
        mode = "auto" if self.drafter else "off"
        return generation_pb2.GenerateRequest(
            text=prompts(self.kind, PROMPTS)[number % PROMPTS],
            task=f"{self.kind}, {self.drafter}",  # no drafter sees past answers that another was asked for
            speculation=generation_pb2.SpeculationSettings(mode=mode, drafter=self.drafter),
            sampling=generation_pb2.Sampling(
                temperature=self.temperature, max_tokens=tokens, ignore_eos=True, seed=number
            ),
        )


class Asking:
    """A service's only client. It gives no number twice: past answers never hold the very text."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._numbers = itertools.count(0, OTHERS)

    async def prime(self, kind: str) -> None:
        """Takes the prompts in."""
        for number in range(PROMPTS):
            await self._stub.Complete(Asked(kind, None, 0.0).request(number, tokens=1))

    async def answers(self, asked: Asked, streams: int, windows: Windows) -> Slice:
        """Of the counted seconds."""
        client = Client(self._stub, asked.request, ANSWER, next(self._numbers))
        start = windows.warm_s + await client.follow([(windows.warm_s + windows.counted_s, streams)])
        return slice_of(client.answers, start, start + windows.counted_s)
