"""``outrider check A B``: whether two deployments give equal answers, or how they differ."""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.json_output import add_json, print_or_write
from outrider.cli.options import add_options, read_options
from outrider.cli.service import API_KEY, exit_code
from workshop.checking.errors import CheckError
from workshop.checking.settings import CheckSettings
from workshop.extra import require

if TYPE_CHECKING:
    from workshop.checking.report import CheckReport

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
PROGRESS_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 no difference found, 1 they differ, 2 it could not be known"
    parser.add_argument("a", metavar="A", help="base URL of a deployment: http://127.0.0.1:8000")
    parser.add_argument("b", metavar="B", help="base URL of another deployment, or of A again")
    parser.add_argument("--report", type=Path, metavar="NAME", help="writes NAME.md and NAME.json")
    add_json(parser)
    add_options(parser, CheckSettings)


def run(options: argparse.Namespace) -> int:
    return exit_code(lambda: _run(options), (CheckError, OSError, ValueError), UNKNOWN)


def _run(options: argparse.Namespace) -> int:
    settings = read_options(options, CheckSettings)
    for package in ("httpx", "numpy"):
        require(package, "outrider check", "check")
    report = asyncio.run(_check(options.a, options.b, settings))
    _print(report, options)
    return DIFFERENT if report.differs else SAME


async def _check(a: str, b: str, settings: CheckSettings) -> "CheckReport":
    import httpx

    from workshop.checking.check import check
    from workshop.checking.deployment import Deployment

    key = os.environ.get(API_KEY)
    client: dict[str, Any] = {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": settings.timeout_s,
        "limits": httpx.Limits(max_connections=settings.concurrency),
    }
    async with (
        httpx.AsyncClient(base_url=a, **client) as of_a,
        httpx.AsyncClient(base_url=b, **client) as of_b,
    ):
        sides = Deployment("A", of_a, settings.a_speculation), Deployment("B", of_b, settings.b_speculation)
        return await check(*sides, settings, ProgressLine())


def _print(report: "CheckReport", options: argparse.Namespace) -> None:
    from workshop.checking.markdown import markdown

    text = markdown(report)
    print_or_write(text.rstrip("\n"), report.as_json(), options.json)
    if (name := options.report) is not None:
        name.with_suffix(".md").write_text(text)
        name.with_suffix(".json").write_text(json.dumps(report.as_json(), indent=1) + "\n")


class ProgressLine:
    """Progress on stderr, a line every PROGRESS_EVERY_S at most."""

    def __init__(self) -> None:
        self._printed_at = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if done == of or now - self._printed_at >= PROGRESS_EVERY_S:
            self._printed_at = now
            print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)
