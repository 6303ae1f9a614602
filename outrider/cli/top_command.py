"""``outrider top``: the load and the speed of a running service, live."""

import argparse
import os
import sys
import time
from typing import Any

from google.protobuf.json_format import MessageToDict

from outrider.cli.json_output import add_json, print_or_write
from outrider.cli.service import API_KEY, add_address, exit_code
from outrider.client.client import Client
from outrider.client.loads import LoadHistory, TaskRates
from protos import generation_pb2

CLEAR = "\033[2J\033[H"
NOTHING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks [%(default)s]")
    parser.add_argument("--looks", type=int, default=0, help="looks before it ends [0: Ctrl-C ends it]")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    history, looks = LoadHistory(), 0
    with Client(options.address, os.environ.get(API_KEY)) as client:
        while True:
            history.add(client.loads(), time.monotonic())
            shown = (CLEAR if sys.stdout.isatty() else "") + screen(history)
            print_or_write(shown, figures(history), options.json)
            looks += 1
            if looks == options.looks:
                return 0
            time.sleep(options.every)


def figures(history: LoadHistory) -> dict[str, Any]:
    """Returns a machine-readable snapshot; rates per second need two answers of a gateway."""
    return {
        "gateways": [
            MessageToDict(each, preserving_proto_field_name=True) for each in history.newest.values()
        ],
        "rates": [
            {"task": task, "drafter": drafter, **rates.per_second}
            for (task, drafter), rates in sorted(history.rates().items())
        ],
    }


def screen(history: LoadHistory) -> str:
    """Returns the text of a snapshot; rates need two answers of a gateway."""
    gateways = list(history.newest.values())
    rates = history.rates()
    lines = [
        _summary(gateways, rates),
        "",
        _row(
            "task",
            "drafter",
            "tokens/s",
            "acceptance",
            "tokens/pass",
            "fallbacks/s",
            "reopenings/s",
            "moves/s",
        ),
    ]
    lines += [_task(*kind, of_task) for kind, of_task in sorted(rates.items())]
    lines += ["", _row("depth by", "sequences", "mean depth")]
    lines += [
        _row(reason, str(sequences), f"{mean:.1f}") for reason, (sequences, mean) in history.depths().items()
    ]
    lines += ["", _row("worker", "address", "running", "waiting", "blocks used", "step ms", "reply age s")]
    lines += [_worker(worker) for worker in sorted(history.workers(), key=lambda worker: worker.role)]
    return "\n".join([*lines, ""])


def _summary(gateways: list[generation_pb2.Loads], rates: dict[tuple[str, str], TaskRates]) -> str:
    tokens = sum(of_task.per_second["tokens"] for of_task in rates.values())
    is_known = all(loads.HasField("plain_tokens_per_second") for loads in gateways)
    plain = sum(loads.plain_tokens_per_second for loads in gateways) if is_known else None
    return (
        f"{len(gateways)} gateway{'s' if len(gateways) > 1 else ''}: "
        f"{sum(loads.running for loads in gateways)} running, "
        f"{sum(loads.waiting for loads in gateways)} waiting, {tokens:.0f} tokens/s, "
        f"plain decoding would give {f'{plain:.0f}' if plain else NOTHING}"
    )


def _task(task: str, drafter: str, rates: TaskRates) -> str:
    return _row(
        task,
        drafter,
        f"{rates.per_second['tokens']:.0f}",
        _number(rates.ratio("accepted", "reached")),
        _number(rates.ratio("tokens", "target_passes")),
        f"{rates.per_second['fallbacks']:.1f}",
        f"{rates.per_second['reopenings']:.1f}",
        f"{rates.per_second['moves']:.1f}",
    )


def _worker(worker: generation_pb2.WorkerLoad) -> str:
    heard = worker.HasField("reply_age_s")
    used = worker.total_blocks - worker.free_blocks
    return _row(
        " ".join(filter(None, [worker.role, worker.draft])) + (" (suspect)" if worker.suspect else ""),
        worker.address,
        str(worker.running) if heard else NOTHING,
        str(worker.waiting) if heard else NOTHING,
        f"{used} of {worker.total_blocks}" if heard else NOTHING,
        f"{worker.step_ms:.1f}" if worker.HasField("step_ms") else NOTHING,
        f"{worker.reply_age_s:.0f}" if heard else NOTHING,
    )


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def _row(first: str, second: str, *others: str) -> str:
    return f"{first[:20]:20} {second[:22]:22}" + "".join(f"{cell:>15}" for cell in others)
