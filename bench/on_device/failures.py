"""Kills workers under load: `python -m bench on_device failures`.

Each part starts a service with the pair of `bench.on_device.pair` and kills one process while streams are
open. A row has the number of correct texts and the longest pause that a client saw. It also has the seconds
until a replacement joined, and the GPU memory in use before and after.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.on_device import pair
from bench.on_device.figures import Part, Rows, take_parts
from bench.on_device.service import WAYS, served
from tests.support.machines import Running, stream
from tests.support.patience import wait_until

SECONDS, PART_S = 400.0, 120.0
STREAMS, AFTER = 8, 3  # concurrent streams; chunks of the first stream before the process is killed
PROMPT, TOKENS = 64, 400  # tokens
SPECULATION = {"mode": "fixed", "depth": 4}


def killed(role: str, process: str, options: argparse.Namespace) -> Rows:
    """Kills the frontend or the engine of a role's worker, and yields the effect on streams."""
    own = options.out / f"{role} {process}"
    with served(options.pair, WAYS["workers"], own) as service, ThreadPoolExecutor(STREAMS) as threads:
        running = Running(service.http, service.grpc)
        (worker,) = running.workers(role)
        before, killed_at = held_bytes(), list[float]()

        def kill() -> None:
            killed_at.append(time.monotonic())
            os.kill(worker["pid"] if process == "frontend" else worker["ranks"][0], signal.SIGKILL)

        def is_correct(number: int) -> tuple[bool, float]:
            request, text = known_answer(number, options.pair)
            answer = stream(running, request, AFTER, kill if number == 0 else lambda: None)
            return answer.text.split() == text.split(), answer.longest_pause_s

        answers = threads.map(is_correct, range(STREAMS))
        wait_until(lambda: killed_at)
        wait_until(lambda: running.pids(role) - {worker["pid"]})
        replaced_s = time.monotonic() - killed_at[0]
        correct, pauses = zip(*answers, strict=True)
        yield {
            "replaced after, s": replaced_s,
            "streams": STREAMS,
            "correct texts": sum(correct),
            "longest pause, s": max(pauses),
            "held before, bytes": before,
            "held after, bytes": held_bytes(),
        }


def known_answer(number: int, folder: Path) -> tuple[dict[str, Any], str]:
    """Returns a request over HTTP, and the known text of its answer."""
    vocab_size = json.loads((folder / "target" / "config.json").read_text())["vocab_size"]
    prompt = pair.prompt(number, PROMPT, vocab_size)
    fields = {"max_tokens": TOKENS, "temperature": 0.7, "seed": number, "speculation": SPECULATION}
    text = pair.text(prompt[-1], TOKENS, vocab_size)
    return {"prompt": " ".join(map(str, prompt)), **fields}, " ".join(map(str, text))


def held_bytes() -> int | None:
    """Returns the GPU memory that all processes hold, in bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


PARTS: dict[str, Part] = {
    f"{process} of the {role}": partial(killed, role, process)
    for role in ("target", "draft")
    for process in ("engine", "frontend")
}


def main(arguments: Sequence[str]) -> None:
    take_parts(__name__, PARTS, arguments, seconds=SECONDS, most_s=PART_S)
