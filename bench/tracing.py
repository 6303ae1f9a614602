"""What tracing costs: `python -m bench tracing`.

Draft and target are processes of their own behind real gRPC, as in the service; this process is the gateway
and its clients, some streams at a time. All three export over OTLP to a collector in yet another process that
drops what it gets. Only requests below a sampled trace context are traced, so traced and untraced slices
alternate within the same processes, both with the same requests; the ratio of their tokens/s is the median
over pairs of slices. Beside it, less moved by what else the machine does, the processor time of a token.
"""

import argparse
import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent import futures
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil  # type: ignore[import-untyped]
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from tokenizers import Tokenizer

from actors.garbage import settle
from bench.checkpoints import DRAFT, INFLATED, inflated_target
from bench.load import STRIDE, cache_bytes, mode
from bench.load_rows import Row, interval
from bench.report import save, table
from bench.streams import TASKS, Client, connected, request_of, slice_of
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from gateway.workers.fleet import Fleet
from gateway.workers.streams import Role, WorkerInfo
from outrider.engine.settings import EngineSettings
from tests.support.process_worker import process_of, serve_worker
from tests.support.service import public_grpc
from tests.support.trust import TRUST

BAR = 0.97
DRAFT_AHEAD = 12  # as a deployment has it
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
SETTINGS = GatewaySettings(model="m", tokenizer="t", propose_deadline_ms=1e6)


def serve_sink(ready: Connection) -> None:
    """The process of a collector that drops everything, until it is ended."""
    drop = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(COLLECTOR, {"Export": drop})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(f"http://127.0.0.1:{port}")
    server.wait_for_termination()


def trace_to(collector: str) -> None:
    """Has this process export, but only what is below a sampled trace context."""
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(collector)))
    trace.set_tracer_provider(provider)


def serve_traced_worker(role: Role, settings: EngineSettings, collector: str, ready: Connection) -> None:
    """A worker's process, until it is ended."""
    trace_to(collector)
    serve_worker(role, settings, ready)


class Traced:
    """A stub whose requests are sampled."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._numbers = itertools.count(1)

    def Generate(self, request: Any) -> Any:  # noqa: N802
        """Each request is a trace of its own."""
        traceparent = f"00-{next(self._numbers):032x}-{1:016x}-01"
        return self._stub.Generate(request, metadata=(("traceparent", traceparent),))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)


@asynccontextmanager
async def gateway(workers: Sequence[WorkerInfo]) -> AsyncIterator[str]:
    """Its address; it runs in this process."""
    fleet = Fleet(lambda: workers, TRUST)
    generation = Generation(SETTINGS, Tokenizer.from_file(str(DRAFT / "tokenizer.json")), fleet)
    async with public_grpc(generation) as address:
        yield address
    await fleet.close()


def processor_seconds() -> dict[str, float]:
    """That each process has used so far; this one is the gateway and its clients."""
    own = psutil.Process()
    children = sorted(own.children(), key=lambda child: child.create_time())
    others = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
    processes = dict(zip(("gateway", "collector", "target", "draft"), (own, *others), strict=True))
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


async def measure(workers: Sequence[WorkerInfo], options: argparse.Namespace) -> list[Row]:
    rows = []
    async with gateway(workers) as address, connected(address) as stub:
        stubs = {"untraced": stub, "traced": Traced(stub)}
        for drafting in options.modes:
            asked = partial(request_of, TASKS, drafting)
            rates: dict[str, list[float]] = {name: [] for name in stubs}
            used: dict[str, list[dict[str, float]]] = {name: [] for name in stubs}
            for number in range(options.pairs):
                for name in sorted(stubs, reverse=number % 2 == 0):
                    client = Client(stubs[name], asked, options.tokens, number * STRIDE)
                    before = processor_seconds()
                    begun = await client.follow([(options.warmup + options.seconds, options.streams)])
                    after = processor_seconds()
                    start = begun + options.warmup
                    rates[name].append(slice_of(client.answers, start, start + options.seconds).rate)
                    tokens = sum(arrival.tokens for answer in client.answers for arrival in answer.arrivals)
                    used[name].append({part: (after[part] - before[part]) / max(tokens, 1) for part in after})
                print(f"{drafting}, pair {number + 1} of {options.pairs}", flush=True)
            rows.append({"mode": drafting, "streams": options.streams, **compared(rates, used)})
            print(table(rows[-1:]), flush=True)
    return rows


def compared(rates: Mapping[str, Sequence[float]], used: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    """Tokens/s traced and not, their ratio, and the processor time that a token took."""
    # Beside a slice in which something else held the machine up there is nothing to compare.
    ratios = [on / off for on, off in zip(rates["traced"], rates["untraced"], strict=True) if off]
    low, high = interval(ratios)
    ratio = statistics.median(ratios)
    row: Row = {f"{name}, tokens/s": statistics.median(of_name) for name, of_name in rates.items()}
    row |= {"ratio": ratio, "low": low, "high": high, "bar": BAR, "ok": ratio >= BAR, "pairs": len(ratios)}
    for name, of_name in used.items():
        for part in of_name[0]:
            row[f"{part}, {name}, CPU ms/token"] = 1e3 * statistics.median(one[part] for one in of_name)
    return row


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench tracing", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=INFLATED, default="60M")
    parser.add_argument("--target-threads", type=int, default=2, help="the draft has one")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--modes", type=mode, nargs="+", default=["fixed-4", "adaptive"])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--pairs", type=int, default=20, help="of a traced and an untraced slice")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a slice is measured for")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before")
    options = parser.parse_args(arguments)
    shared = {"dtype": "float32", "cache_memory": cache_bytes(options.target)}
    path = str(inflated_target(options.target))
    of_target = EngineSettings.model_validate({**shared, "model": path, "threads": options.target_threads})
    of_draft = EngineSettings.model_validate(
        {**shared, "model": str(DRAFT), "threads": 1, "draft_ahead": DRAFT_AHEAD}
    )
    with process_of(serve_sink) as sink:
        trace_to(sink)
        with (
            process_of(serve_traced_worker, "target", of_target, sink) as target,
            process_of(serve_traced_worker, "draft", of_draft, sink) as draft,
        ):
            workers = [target, draft]
            settle()
            rows = asyncio.run(measure(workers, options))
    print(save("tracing", rows, threads={"target": options.target_threads, "draft": 1}))
