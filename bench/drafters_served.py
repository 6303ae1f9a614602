"""The part of `python -m bench drafters` that starts services: drafters under the pace, asked over gRPC.

Plain decoding has its turns between them, since a shared machine is not always as fast, and all turns are
alike: as streams begin together, the first seconds are not like those that follow.
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
OTHERS = 1000  # requests from one turn to the next


@dataclass(frozen=True)
class Served:
    """A deployment beside the same target, and the drafters that requests to it can name."""

    settings: Mapping[str, object]
    named: Mapping[str, str]  # by drafter of the bench


@dataclass(frozen=True)
class Windows:
    """Seconds of each turn."""

    learning_s: float  # of a drafter on a kind of text before its first turn
    warm_s: float
    counted_s: float


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
                await asking.learn(Asked(kind, drafter, temperatures[0]), count, windows)
                first, *others = temperatures
                done = {first: await asking.answers(Asked(kind, drafter, first), count, windows)}
                plain = await asking.answers(Asked(kind, None, first), count, windows)
                for other in others:
                    done[other] = await asking.answers(Asked(kind, drafter, other), count, windows)
                rows += [
                    {
                        "drafter": name,
                        "kind": kind,
                        "temperature": temperature,
                        "streams": count,
                        "tokens/s": drafted.rate,
                        "plain, tokens/s": plain.rate,
                        "to plain": drafted.rate / plain.rate,
                        "tokens per pass": drafted.rate * windows.counted_s / max(drafted.passes, 1),
                        "share of passes with a Draft": drafted.rounds / max(drafted.passes, 1),
                    }
                    for temperature, drafted in done.items()
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

    async def learn(self, asked: Asked, streams: int, windows: Windows) -> None:
        """Gives the pace time to."""
        await self._follow(asked, streams, windows.learning_s)

    async def answers(self, asked: Asked, streams: int, windows: Windows) -> Slice:
        """Of the counted seconds."""
        begun, client = await self._follow(asked, streams, windows.warm_s + windows.counted_s)
        start = begun + windows.warm_s
        return slice_of(client.answers, start, start + windows.counted_s)

    async def _follow(self, asked: Asked, streams: int, seconds: float) -> tuple[float, Client]:
        """When it began, and its client."""
        client = Client(self._stub, asked.request, ANSWER, next(self._numbers))
        return await client.follow([(seconds, streams)]), client
