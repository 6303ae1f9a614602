"""Prompts of a kind outside the demo pair's training text: `python -m workshop.demo.consignments FILE`.

Each prompt has two consignment notes, field by field, and the beginning of a third note. In
docs/fitting-a-draft.md a draft is fitted to them.
"""

import argparse
import json
from pathlib import Path
from random import Random

from workshop.demo.facts import CITIES, COLOURS, NAMES, PRODUCTS, SURNAMES

KIND = "consignments"
STATES = ["announced", "collected", "on the way", "at customs", "delivered", "lost"]
GIVEN_FIELDS = (1, 4)  # least and most fields of the last note that are in the prompt


def note(random: Random) -> list[str]:
    """Returns the lines of a note."""
    sender, receiver = random.sample(NAMES, 2)
    start, end = random.sample(CITIES, 2)
    weight = random.randint(1, 400)
    return [
        f"%% consignment {random.randint(10000, 99999)}",
        f"sender   | {sender} {random.choice(SURNAMES)}, {start}",
        f"receiver | {receiver} {random.choice(SURNAMES)}, {end}",
        f"goods    | {random.randint(2, 60)} x {random.choice(COLOURS)} {random.choice(PRODUCTS)}",
        f"weight   | {weight} kg gross, {max(1, weight - random.randint(1, 9))} kg net",
        f"fragile  | {random.choice(['yes', 'no'])}",
        f"state    | {random.choice(STATES)}",
        "%% end",
    ]


def prompt(random: Random) -> str:
    """Returns two notes, and the first fields of the next."""
    lines = [*note(random), *note(random), *note(random)[: 1 + random.randint(*GIVEN_FIELDS)]]
    return "\n".join(lines)


def consignments(count: int) -> list[str]:
    """Returns a number of prompts."""
    random = Random(f"{KIND} 1")
    return [prompt(random) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.demo.consignments", description=__doc__)
    parser.add_argument("output", type=Path, help="file, a line of JSON for each prompt")
    parser.add_argument("--prompts", type=int, default=400)
    arguments = parser.parse_args()
    lines = [json.dumps({"prompt": text, "task": KIND}) for text in consignments(arguments.prompts)]
    arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
