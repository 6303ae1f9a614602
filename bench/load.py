"""Measures a running service under load, by concurrency and mode of speculation: `python -m bench load`.

`serve run cluster.app` runs in processes of its own and is driven over gRPC. It serves the demo target
inflated to a realistic cost, or a smaller target for many streams, with the demo draft. The modes take turns
within one running service. Each mode gets slices of a few seconds with the same requests. Adaptive drafting
is compared slice by slice with a reference; the ratio is the median over the slices.

- closed: tokens/s and latencies at each concurrency, with mixed tasks; each stream sends one request after
  another. The reference is the mode with the best median.
- creative: stories at a temperature at which no draft guesses well, compared with plain decoding.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.checkpoints import DRAFT, INFLATED, target_path
from bench.load_rows import Row, against_best, summary
from bench.report import RESULTS, command, parser_of, save, table
from bench.streams import CREATIVE, LoadClient, Slice, connected, request_of, slice_of, speculation_of
from outrider.demo.prompts import KINDS
from tests.support.running import serving

ROOM = 128 * 512  # capacity of a worker's cache, tokens
STRIDE = 9  # offset of request numbers between slices: another task and temperature come first
WARMUP_PER_STREAM_S = 0.016  # more warm-up per stream: simultaneous prompts are prefilled one after another
SECONDS_PER_STREAM = 0.012  # longer slices, because steps take longer with many streams
BEGUN = time.monotonic()


async def closed(stub: Any, point: Row, options: argparse.Namespace) -> dict[str, list[Row]]:
    slices = await slices_of(stub, point, options.modes, [*KINDS, CREATIVE], options)
    rows = [{**point, "mode": mode, **summary(of_mode)} for mode, of_mode in slices.items()]
    return {"rows": rows, "ratios": [{**point, **row} for row in against_best(slices)]}


async def creative(stub: Any, point: Row, options: argparse.Namespace) -> dict[str, list[Row]]:
    slices = await slices_of(stub, point, ["plain", "adaptive"], [CREATIVE], options)
    return {"creative": [{**point, **row} for row in against_best(slices)]}


SECTIONS = {"closed": closed, "creative": creative}
LISTS = ("rows", "ratios", "creative")  # lists of rows in load.json


async def slices_of(
    stub: Any, point: Row, modes: Sequence[str], tasks: Sequence[str], options: argparse.Namespace
) -> dict[str, list[Slice]]:
    """Returns slices by mode. In one slice all modes get the same requests in the same order."""
    streams: int = point["streams"]
    warmup = options.warmup + streams * WARMUP_PER_STREAM_S
    seconds = options.seconds + streams * SECONDS_PER_STREAM
    measured: dict[str, list[Slice]] = {mode: [] for mode in modes}
    for number in range(options.slices):
        progress(f"{len(tasks)} tasks, {point}, slice {number + 1} of {options.slices}")
        for mode in rotated(modes, number):
            client = LoadClient([stub], partial(request_of, tasks, mode), options.tokens, number * STRIDE)
            start = warmup + await client.follow(warmup + seconds, streams)
            measured[mode].append(slice_of(client.answers, start, start + seconds))
    return measured


def progress(text: str) -> None:
    print(f"[{(time.monotonic() - BEGUN) / 60:.1f} min] {text}", flush=True)


def rotated(modes: Sequence[str], by: int) -> list[str]:
    """Returns the modes rotated, so that each mode comes first in some slice."""
    by %= len(modes)
    return [*modes[by:], *modes[:by]]


def keep(results: Mapping[str, list[Row]], section: str, target: str, target_threads: int) -> None:
    """Writes load.json. Earlier results of other sections and targets are kept, with their own command."""
    path = RESULTS / "load.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    facts = {name: _merged(before.get(name, []), results.get(name)) for name in LISTS}
    commands = {**before.get("commands", {}), f"{section}, {target}": command()}
    threads = {"target": target_threads, "draft": 1}
    print(save("load", facts.pop("rows"), commands=commands, threads=threads, **facts), flush=True)


def _merged(before: list[Row], now: list[Row] | None) -> list[Row]:
    """Returns the new rows, and the earlier rows of targets that were not measured now."""
    if now is None:
        return before
    measured = {row["target"] for row in now}
    return [*(row for row in before if row["target"] not in measured), *now]


def cache_bytes(target: str) -> int:
    """Returns the bytes of a cache for ROOM tokens in float32."""
    size = INFLATED[target]
    return ROOM * size.layers * 2 * size.kv_heads * (size.hidden // size.heads) * 4


async def measure(
    address: str,
    target: str,
    concurrencies: Sequence[int],
    options: argparse.Namespace,
    results: dict[str, list[Row]],
) -> None:
    """Adds the rows of this target to the results, and writes them after each section."""
    async with connected(address) as stub:
        for section in options.sections:
            for streams in concurrencies:
                point = {"target": target, "streams": streams}
                for name, rows in (await SECTIONS[section](stub, point, options)).items():
                    results.setdefault(name, []).extend(rows)
                    print(table(rows), flush=True)
            keep(results, section, target, options.target_threads)


def mode(text: str) -> str:
    """Returns the name of a mode. Raises ValueError if there is no such mode."""
    speculation_of(text)
    return text


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("load", __doc__)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; none: all"
    )
    parser.add_argument("--targets", nargs=2, choices=INFLATED, default=["190M", "60M"])
    parser.add_argument(
        "--from", type=int, default=16, dest="many", help="streams, from which on the second target serves"
    )
    parser.add_argument("--target-threads", type=int, default=2, help="the draft has one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--modes", type=mode, nargs="+", default=["plain", "fixed-4", "fixed-6", "adaptive"])
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--slices", type=int, default=7, help="slices of each mode at each point")
    parser.add_argument(
        "--seconds", type=float, default=0.8, help="time of a slice, and 12 ms more per stream"
    )
    parser.add_argument("--warmup", type=float, default=0.3, help="seconds before, and 16 ms more per stream")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    options.sections = options.sections or list(SECTIONS)
    return options


def main(arguments: Sequence[str]) -> None:
    options = parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs the context managers that stop the service
    results: dict[str, list[Row]] = {}
    of_targets: dict[str, list[int]] = {}
    for streams in options.concurrency:
        of_targets.setdefault(options.targets[streams >= options.many], []).append(streams)
    for target, concurrencies in of_targets.items():
        progress(f"starting the service, {target}")
        settings = {
            "target": target_path(target),
            "target.dtype": "float32",
            "target.threads": options.target_threads,
            "target.cache_memory": cache_bytes(target),
            "draft": DRAFT,
            "drafts.model.dtype": "float32",
            "drafts.model.cache_memory": cache_bytes(target),
        }
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), settings) as service:
            asyncio.run(measure(service.grpc, target, concurrencies, options, results))
