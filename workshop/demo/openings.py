"""Prompts to train drafters on, by kind: `python -m workshop.demo.openings prompts.json`.

They are the beginnings of documents that the demo target was trained on. Held-out documents are left out.
"""

import argparse
import json
from pathlib import Path
from random import Random

from outrider.demo.prompts import KINDS, held_out
from workshop.demo.corpus import load_corpus, without
from workshop.demo.train import WEIGHTS

SHORTEST, LONGEST = 40, 500  # characters
CHARACTERS = 1_500_000  # characters of documents per kind from which openings are drawn


def openings(documents: list[str], count: int, random: Random) -> list[str]:
    """Returns beginnings of random documents, each ending with a word."""
    return [opening(random.choice(documents), random) for _ in range(count)]


def opening(document: str, random: Random) -> str:
    """Returns the beginning of a document, up to a word."""
    start = document[: random.randint(SHORTEST, LONGEST)]
    words = start.rsplit(maxsplit=1)
    return document[: len(words[0])] if len(words) == 2 else start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.demo.openings", description=__doc__)
    parser.add_argument("output", type=Path, help="JSON file")
    parser.add_argument("--prompts", type=int, default=8000, help="of all kinds")
    arguments = parser.parse_args()
    random, total = Random("openings"), sum(WEIGHTS.values())
    training = load_corpus(CHARACTERS).training
    prompts = {}
    for kind in KINDS:
        documents = without(held_out()[kind], training[kind])
        prompts[kind] = openings(documents, arguments.prompts * WEIGHTS[kind] // total, random)
    arguments.output.write_text(json.dumps(prompts, indent=1) + "\n")


if __name__ == "__main__":
    main()
