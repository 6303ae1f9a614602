"""Measures the service on a GPU, under Ray: `python -m bench on_device service`.

`serve run cluster.app` serves the pair of `bench.on_device.pair` and is asked at the gateway's own gRPC port.
Each part but the first starts a service; parts differ in how target and draft share the GPU:

- masks: starts Ray, and shows which GPUs a worker with 0, 0.5 or 1 GPU can see;
- colocated: the draft is in the target's process, which is the default;
- workers: target and draft have a worker each, without draft-ahead;
- ahead: as workers, with draft-ahead, whose steps compete with the target's steps;
- mps: as ahead, with NVIDIA's MPS, so that steps of both processes run concurrently;
- batch_invariant: as colocated, with batch-invariant numerics.

A row is for a mode at a number of streams. It has rates and latencies as in `bench.load`, the rate relative
to plain decoding, rounds, and tokens per pass. Then follow the measured and the known acceptance rate, the
number of correct texts, processor time of each process, and GPU utilization.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import ray
import torch

from bench.host import spent
from bench.load_rows import summary
from bench.on_device import pair
from bench.on_device.figures import Part, Rows, take_parts
from bench.streams import LoadClient, StreamAnswer, percentile, slice_of, speculation_of
from protos import generation_pb2, generation_pb2_grpc
from tests.support.running import Service, serving

SECONDS, PART_S = 540.0, 360.0
SHARES = {"target.gpus": 0.6, "drafts.model.gpus": 0.3}
WAYS: dict[str, dict[str, object]] = {
    "colocated": {},
    "workers": {**SHARES, "drafts.model.draft_ahead": 0},
    "ahead": {**SHARES, "drafts.model.draft_ahead": 12},
    "mps": {**SHARES, "drafts.model.draft_ahead": 12},
    "batch_invariant": {"target.batch_invariant": True},
}
CONNECTIONS = 16  # connections to the service: the kernel assigns each to one of the gateways at the port
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]  # otherwise the channels would share a connection
BYTES_ON_CPU = 2**26  # size of a worker's cache without a GPU


@dataclass(frozen=True)
class LoadSizes:
    """Sizes of the load."""

    streams: Sequence[int]
    modes: Sequence[str]
    warm_up_s: float
    seconds_of_row: float  # time of a row, after its warm-up
    prompt: int  # tokens
    long_prompt: int  # tokens; in the last rows, one of LONG_EVERY requests has such a prompt
    tokens: int  # length of an answer


REAL = LoadSizes((1, 8, 32, 64), ("plain", "adaptive", "fixed-3", "fixed-5", "fixed-8"), 3, 8, 200, 8192, 256)
SMALL = LoadSizes((2,), ("plain", "fixed-3"), 0.5, 1, 8, 64, 16)
LONG_EVERY = 32


@dataclass(frozen=True)
class ServiceLoad:
    """Requests to a running service."""

    service: Service
    channels: Sequence[grpc.aio.Channel]
    stubs: Sequence[Any]
    vocab_size: int
    sizes: LoadSizes

    @classmethod
    async def of(cls, service: Service, sizes: LoadSizes) -> "ServiceLoad":
        channels = [grpc.aio.insecure_channel(service.direct, OWN_CONNECTION) for _ in range(CONNECTIONS)]
        stubs: list[Any] = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        model = await stubs[0].GetModel(generation_pb2.GetModelRequest())
        return cls(service, channels, stubs, model.vocab_size, sizes)

    async def aclose(self) -> None:
        """Closes the connections."""
        for channel in self.channels:
            await channel.close(None)

    async def row(self, mode: str, streams: int, longest: int) -> dict[str, Any]:
        """Returns the figures of a mode. longest: prompt length of one of LONG_EVERY requests, tokens."""
        sizes, before = self.sizes, spent(self.service)
        client = LoadClient(self.stubs, partial(self._request, mode, longest), sizes.tokens, 0)
        with gpu_busy() as busy:
            start = sizes.warm_up_s + await client.follow(sizes.warm_up_s + sizes.seconds_of_row, streams)
        after = spent(self.service)
        measured = slice_of(client.answers, start, start + sizes.seconds_of_row)
        reached = sum(stats.reached for stats in measured.finished)
        accepted = sum(stats.accepted for stats in measured.finished)
        correct = await asyncio.gather(*(self._is_correct(mode, number) for number in range(streams)))
        return {
            "streams": streams,
            "mode": mode,
            **summary([measured]),
            "rounds/s": measured.rounds / sizes.seconds_of_row,
            "tokens a pass": measured.rate * sizes.seconds_of_row / measured.passes
            if measured.passes
            else None,
            "acceptance rate": accepted / reached if reached else None,
            "known acceptance rate": pair.ACCEPTANCE,
            "between chunks p99, ms": percentile(pauses(client.answers, start), 99),
            "correct texts": sum(correct),
            "processor, s": {name: round(after[name] - before[name], 2) for name in after},
            "GPU busy, %": statistics.mean(busy) if busy else None,
        }

    def _request(self, mode: str, longest: int, number: int, tokens: int) -> generation_pb2.GenerateRequest:
        length = longest if number % LONG_EVERY == LONG_EVERY - 1 else self.sizes.prompt
        speculation = speculation_of(mode)
        speculation.report = True
        return generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenIds(ids=pair.prompt(number, length, self.vocab_size)),
            speculation=speculation,
            sampling=generation_pb2.Sampling(temperature=0.7, max_tokens=tokens, seed=number),
        )

    async def _is_correct(self, mode: str, number: int) -> bool:
        request = self._request(mode, self.sizes.prompt, number, self.sizes.tokens)
        answer = await self.stubs[number % len(self.stubs)].Complete(request)
        known = pair.text(request.tokens.ids[-1], self.sizes.tokens, self.vocab_size)
        return [*answer.choices[0].token_ids] == known


def pauses(answers: Sequence[StreamAnswer], start: float) -> list[float]:
    """Returns the milliseconds between successive chunks of each answer that came after ``start``."""
    times = ([arrival.time for arrival in answer.arrivals if arrival.time > start] for answer in answers)
    return [1e3 * (later - earlier) for of_answer in times for earlier, later in pairwise(of_answer)]


@contextmanager
def gpu_busy() -> Iterator[list[float]]:
    """Yields a list that is filled at the end: GPU utilization in percent, every quarter of a second."""
    found: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "250"]
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
        assert process.stdout is not None
        found += [float(line) for line in process.stdout]


@contextmanager
def served(folder: Path, way: Mapping[str, object], own: Path) -> Iterator[Service]:
    """Runs a service of the pair, with its output in the folder ``own``. Caches are small without a GPU."""
    settings: dict[str, object] = {"target": folder / "target", "draft": folder / "draft", **way}
    if not torch.cuda.is_available():
        settings = {name: value for name, value in settings.items() if not name.endswith(".gpus")}
        for model in ("target", "drafts.model"):
            settings |= {f"{model}.dtype": "float32", f"{model}.cache_memory": BYTES_ON_CPU}
    own.mkdir(parents=True, exist_ok=True)
    with serving(own, settings) as service:
        yield service


def masks(_: argparse.Namespace) -> Rows:
    """Yields free space on disk and in shared memory, and the GPUs that a worker with some GPUs sees."""
    yield {f"free in {folder}, bytes": shutil.disk_usage(folder).free for folder in ("/tmp", "/dev/shm")}
    ray.init(num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        visible = ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
        for gpus in (0, 0.5, 1):
            yield {"gpus": gpus, "visible": ray.get(visible.options(num_gpus=gpus).remote())}
    finally:
        ray.shutdown()


def sizes_of(options: argparse.Namespace) -> LoadSizes:
    """Returns the sizes of the load; arguments override the defaults."""
    sizes: LoadSizes = options.sizes
    named = {name: getattr(options, name) for name in ("streams", "modes", "warm_up_s", "seconds_of_row")}
    return replace(sizes, **{name: value for name, value in named.items() if value is not None})


def way(name: str, options: argparse.Namespace) -> Rows:
    """Yields the rows of one way to share the GPU."""
    sizes = sizes_of(options)
    with (
        mps() if name == "mps" else nullcontext(),
        served(options.pair, WAYS[name], options.out / name) as service,
        asyncio.Runner() as runner,
    ):
        load = runner.run(ServiceLoad.of(service, sizes))
        for streams in sizes.streams:
            plain = None
            for mode in sizes.modes:
                row = runner.run(load.row(mode, streams, sizes.prompt))
                plain = plain or row["tokens/s"]
                yield {**row, "to plain": row["tokens/s"] / plain}
        for mode in ("plain", "adaptive"):
            row = runner.run(load.row(mode, max(sizes.streams), sizes.long_prompt))
            yield {"prompts among them": sizes.long_prompt, **row}
        runner.run(load.aclose())


@contextmanager
def mps() -> Iterator[None]:
    """Runs NVIDIA's MPS, with which the GPU runs steps of two processes concurrently."""
    control = "nvidia-cuda-mps-control"
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, check=True)


PARTS: dict[str, Part] = {"masks": masks, **{name: partial(way, name) for name in WAYS}}


def main(arguments: Sequence[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--small", action="store_const", const=SMALL, default=REAL, dest="sizes")
        parser.add_argument("--streams", type=int, nargs="+", help="streams of the rows")
        parser.add_argument("--modes", nargs="+", help="plain, adaptive, or fixed-K")
        parser.add_argument("--warm-up-s", type=float, help="seconds before a row")
        parser.add_argument("--seconds-of-row", type=float, help="seconds of a row")

    take_parts(__name__, PARTS, arguments, seconds=SECONDS, most_s=PART_S, add=add)
