"""``outrider check A B``: whether two deployments say the same, or how they differ."""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from outrider.cli.generate_command import API_KEY, INTERRUPTED
from workshop.checking.settings import CheckSettings

if TYPE_CHECKING:
    from workshop.checking.report import Report

SAME, DIFFERENT, UNKNOWN = 0, 1, 2  # exit codes
PROGRESS_EVERY_S = 1.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "check",
        help="prove that two deployments say the same, or tell how they differ",
        epilog="exit codes: 0 no difference found, 1 they differ, 2 it could not be known",
    )
    parser.add_argument("a", metavar="A", help="base URL of a deployment: http://127.0.0.1:8000")
    parser.add_argument("b", metavar="B", help="of the other one, or the same again")
    parser.add_argument("--report", type=Path, metavar="NAME", help="writes NAME.md and NAME.json")
    for name, field in CheckSettings.model_fields.items():
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "null" if default is None else default or "none"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            metavar=name.rpartition("_")[2].upper(),
            help=f"{field.description} [{shown}]".replace("%", "%%"),
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from workshop.checking.errors import CheckError

    given = {name: value for name, value in vars(options).items() if name in CheckSettings.model_fields}
    try:
        settings = CheckSettings.model_validate(given)
        report = asyncio.run(_check(options.a, options.b, settings))
        _tell(report, options.report)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            name = "--" + str(one["loc"][0]).replace("_", "-")
            print(f"outrider: {name}: {one['msg']}, got {one['input']!r}", file=sys.stderr)
        return UNKNOWN
    except (CheckError, OSError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return INTERRUPTED
    return DIFFERENT if report.differs else SAME


async def _check(a: str, b: str, settings: CheckSettings) -> "Report":
    import httpx

    from workshop.checking.check import check
    from workshop.checking.deployment import Deployment

    key = os.environ.get(API_KEY)
    asked: dict[str, Any] = {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": settings.timeout_s,
        "limits": httpx.Limits(max_connections=settings.concurrency),
    }
    async with (
        httpx.AsyncClient(base_url=a, **asked) as of_a,
        httpx.AsyncClient(base_url=b, **asked) as of_b,
    ):
        sides = Deployment("A", of_a, settings.a_speculation), Deployment("B", of_b, settings.b_speculation)
        return await check(*sides, settings, Progress())


def _tell(report: "Report", name: Path | None) -> None:
    from workshop.checking.markdown import markdown

    text = markdown(report)
    print(text, end="")
    if name is not None:
        name.with_suffix(".md").write_text(text)
        name.with_suffix(".json").write_text(json.dumps(report.as_json(), indent=1) + "\n")


class Progress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self._told = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if done == of or now - self._told >= PROGRESS_EVERY_S:
            self._told = now
            print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)
