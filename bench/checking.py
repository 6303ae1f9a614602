"""Measures what `outrider check` finds, and how many requests it needs: `python -m bench checking`.

Two services of the demo pair in one process, both drafting in every round. In one of them a defect is planted
(tests/support/planted.py), and the check is made with twice as many requests, or texts drawn, until it finds
a difference. Timings play no part.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.report import save, table
from tests.support.planted import DEFECTS, REJECTION, SEEDED, Defect, Services, services

NOTHING = "nothing"
ANSWER_TOKENS = 40
SAMPLED: dict[str, Any] = {"sampled_prompts": 4, "sampled_tokens": 4}


async def row_of(both: Services, defect: Defect, least: int, most: int) -> dict[str, Any]:
    """Returns what it took to find the defect; without a defect, what did not find any."""
    draws = "verification" in defect.settings
    size = most if defect.name == NOTHING else least
    while True:
        asked = {"samples": size, **SAMPLED} if draws else {"requests": size, "answer_tokens": ANSWER_TOKENS}
        started = time.monotonic()
        report = await both.checked(defect, **asked)
        row = {
            "planted": defect.name,
            "verdict": "differs" if report.differs else "same",
            "kinds": ", ".join(kind.kind for kind in report.seeded.kinds) if report.seeded else "",
            "requests": 0 if draws else size,
            "tokens": 0 if report.seeded is None else report.seeded.tokens,
            "identical": 0 if report.seeded is None else report.seeded.identical,
            "texts": size * SAMPLED["sampled_prompts"] if draws else 0,
            "p": None if report.distributions is None else report.distributions.test.p_value,
            "distance": None if report.distributions is None else report.distributions.test.distance,
            "reason": report.reasons[0] if report.reasons else "",
        }
        print(table([row]), f"{time.monotonic() - started:.0f} s", sep="\n", flush=True)
        if report.differs or 2 * size > most:
            return row
        size *= 2


async def measure(least: int, most: int) -> list[dict[str, Any]]:
    """Returns a row per defect, and two rows without a defect: by seeded requests, and by texts drawn."""
    none = [Defect(NOTHING, settings=settings) for settings in (SEEDED, REJECTION)]
    rows = []
    for defect in [*DEFECTS.values(), *none]:
        async with services(defect.b_target) as both:
            rows.append(await row_of(both, defect, least, most))
        save("checking", rows, least=least, most=most)  # the next row may take long
    return rows


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench checking", description="What a check finds.")
    parser.add_argument("--least", type=int, default=4, help="requests, or texts drawn for each prompt")
    parser.add_argument("--most", type=int, default=128, help="the same, after which it gives up")
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options.least, options.most))
    print(table(rows))
