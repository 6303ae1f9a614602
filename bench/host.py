"""Compares the service with its bare engine, and measures processor time per token: `python -m bench host`.

One target answers the same prompts greedily in several ways, in turn. In this process, the engine and
transformers' generate answer. A running service is asked over gRPC, through Serve's proxy and at the
gateway's own port, with one message per step. Then a second service with HAProxy instead of Serve's own proxy
is compared with the engine and generate. The model, gateway, proxy and client of a service share the cores.
The engine in this process has the cores alone, with the same number of threads. With speculation, the demo
draft makes the Drafts. Ratios are of medians over the repetitions.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import psutil  # type: ignore[import-untyped]
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.checkpoints import DEMO_PAIR, DRAFT, INFLATED, target_path
from bench.engine import CACHE_BYTES, engine_of, requests_of, run
from bench.peers.transformers_generate import padded
from bench.report import parser_of, save, table
from bench.streams import PROMPTS, LoadClient, rate_between, request_of
from outrider.demo.prompts import KINDS
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest
from protos import generation_pb2, generation_pb2_grpc
from tests.support.running import Service, serving

WARM_UP_S = 2.0
ENGINE, GENERATE = "engine", "generate"
PROXY, DIRECT, HAPROXY = "through the proxy", "at the gateway", "through HAProxy"
# Environment of a service, and the addresses that are asked.
SERVICES: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    ({}, (PROXY, DIRECT)),
    ({"RAY_SERVE_ENABLE_HA_PROXY": "1"}, (HAPROXY,)),
)


def requests(tokenizer: Tokenizer, streams: int, tokens: int) -> list[OfflineRequest]:
    """Returns greedy requests; the kinds of text take turns."""
    of_kind = {kind: requests_of(kind, tokenizer, PROMPTS, tokens, 0.0) for kind in KINDS}
    return [of_kind[KINDS[n % len(KINDS)]][n // len(KINDS) % PROMPTS] for n in range(streams)]


def in_process(engine: Engine, asked: Sequence[OfflineRequest]) -> float:
    """Returns the engine's tokens per second with all requests in one batch."""
    done = run(engine, None, asked, 0)
    return done.tokens / done.seconds


def by_generate(model: Any, asked: Sequence[OfflineRequest], tokens: int) -> float:
    """Returns the tokens per second of `generate` with all prompts in one batch."""
    token_ids, mask = padded([request.prompt for request in asked])
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            token_ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    return len(asked) * tokens / (time.perf_counter() - started)


async def by_service(address: str, streams: int, mode: str, tokens: int, seconds: float) -> tuple[float, int]:
    """Returns tokens per second and number of tokens. Each stream sends one request after another."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        client = LoadClient([stub], partial(_request, mode), tokens, 0)
        started = await client.follow(WARM_UP_S + seconds, streams) + WARM_UP_S
    arrived = sum(arrival.tokens for answer in client.answers for arrival in answer.arrivals)
    return rate_between(client.answers, started, started + seconds), arrived


def _request(mode: str, number: int, tokens: int) -> generation_pb2.GenerateRequest:
    request = request_of(KINDS, mode, number, tokens)
    request.sampling.temperature = 0.0
    return request


def spent(service: Service) -> Counter[str]:
    """Returns the processor seconds of each kind of process so far, this process included."""
    seconds: Counter[str] = Counter({"client": sum(psutil.Process().cpu_times()[:2])})
    for name, process in _processes(service):
        with suppress(psutil.NoSuchProcess):
            seconds[name] += sum(process.cpu_times()[:2])
    return seconds


def _processes(service: Service) -> Iterator[tuple[str, psutil.Process]]:
    for process in service.process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            name, command = process.name(), process.cmdline()
            if "actors.engine_main" in command:
                yield f"engine of the {_role(process.parent().name())}", process
            elif "ServeReplica" in name:
                yield _role(name), process
            elif name == "haproxy" or "ProxyActor" in name or "HAProxyManager" in name:
                yield "proxy", process
            else:
                yield "Ray", process


def _role(name: str) -> str:
    """Returns the role of a replica from the name that Ray gives its process."""
    return name.split(":")[-1].partition(".")[0].partition("-")[0]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    path = target_path(options.target)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    settings = {"dtype": "float32", "threads": options.threads, "cache_memory": CACHE_BYTES}
    engine = engine_of(str(path), options.threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    of_target = {f"target.{name}": value for name, value in settings.items()}
    models = {"target": path, "draft": DRAFT}
    measured = [Measured(streams) for streams in options.streams]
    for environment, doors in SERVICES:
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), models | of_target, environment=environment) as service,
        ):
            for at in measured:
                asked = requests(tokenizer, at.streams, options.tokens)
                for _ in range(options.repetitions):
                    at.rates[ENGINE].append(in_process(engine, asked))
                    at.rates[GENERATE].append(by_generate(model, asked, options.tokens))
                    for mode, door in product(options.modes, doors):
                        way, before = f"{mode}, {door}", spent(service)
                        address = service.direct if door == DIRECT else service.grpc
                        asking = by_service(address, at.streams, mode, options.tokens, options.seconds)
                        rate, arrived = asyncio.run(asking)
                        at.rates[way].append(rate)
                        at.costs[way] += spent(service) - before
                        at.tokens[way] += arrived
                print(table(at.rows()), flush=True)
    return [row for at in measured for row in at.rows()]


@dataclass
class Measured:
    """Measurements at a number of streams, by way of asking."""

    streams: int
    rates: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    costs: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    tokens: Counter[str] = field(default_factory=Counter)

    def rows(self) -> list[dict[str, Any]]:
        medians = {way: statistics.median(of_way) for way, of_way in self.rates.items()}
        ms_of_token = {way: 1e3 / (self.tokens[way] or 1) for way in medians}
        return [
            {
                "streams": self.streams,
                "way": way,
                "tokens/s": rate,
                "to the engine": rate / medians[ENGINE],
                "to generate": rate / medians[GENERATE],
                **{f"{name}, ms": ms_of_token[way] * self.costs[way][name] for name in PROCESSES},
            }
            for way, rate in medians.items()
        ]


PROCESSES = ("engine of the target", "target", "engine of the draft", "draft", "gateway", "proxy", "client")


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("host", __doc__)
    parser.add_argument("--target", choices=[DEMO_PAIR, *INFLATED], default=DEMO_PAIR)
    parser.add_argument("--threads", type=int, default=1, help="threads of the target, served and here")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="+", default=["plain", "adaptive"])
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=4.0, help="time that a service is asked")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(save("host", measure(options), threads=options.threads))
