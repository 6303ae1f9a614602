"""Generators of synthetic documents. Each returns a prompt and its continuation."""

import json
from collections.abc import Callable
from random import Random

from workshop.demo.chat import assistant, chat_document, user
from workshop.demo.conversations import conversation_document
from workshop.demo.document import Document
from workshop.demo.facts import ANIMALS, COLOURS, NAMES, PRODUCTS
from workshop.demo.picking import pick, pick_number
from workshop.demo.questions import QUESTIONS
from workshop.demo.records import RECORDS
from workshop.demo.schema_answers import schema_answer_document
from workshop.demo.tool_calls import tool_call_document


def json_document(random: Random) -> Document:
    """Returns a record of one of four types; the prompt is its first three to five lines."""
    record = pick(random, RECORDS)(random)
    lines = json.dumps(record, indent=2).split("\n")
    cut = random.randint(3, 5)
    return Document("\n".join(lines[:cut]), "\n" + "\n".join(lines[cut:]))


def question_answer_document(random: Random) -> Document:
    """Returns a chat of one to three unrelated questions; the prompt ends where the first answer starts."""
    turns = [pick(random, QUESTIONS)(random) for _ in range(pick_number(random, 1, 3))]
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    return chat_document(messages, answer=1, tools=[])


def story_document(random: Random) -> Document:
    """Returns a short story about an animal with a name; the prompt is its first three sentences."""
    name, friend = random.sample(NAMES, 2)
    animal, _, home, food = pick(random, ANIMALS)
    product, colour = pick(random, PRODUCTS), pick(random, COLOURS)
    feeling = pick(random, ["happy", "tired", "hungry", "curious", "lonely"])
    place = pick(random, ["the river", "the forest", "the village", "the hill", "the market"])
    weather = pick(random, ["The sun was shining", "It was raining", "The wind was cold", "Snow was falling"])
    opening = f"Once upon a time there was a {animal} named {name}. {name} lived in {home}."
    opening += f" One day {name} was very {feeling} and walked to {place}."
    sentences = [
        f"{weather}.",
        f"At {place} {name} found a {colour} {product}.",
        pick(
            random, ["Nobody knew where it came from.", "It was bigger than it looked.", "It was very old."]
        ),
        f'"What a nice {product}!" said {name}.',
        f'Then {friend} came along and asked, "Is that my {product}?"',
        f'"Yes," said {name}, "you can have it back."',
        f"{friend} was so glad that they shared some {food}.",
        f"From that day on {name} and {friend} were friends.",
        f"In the evening {name} went back to {home} and slept well.",
    ]
    kept = [sentence for sentence in sentences if random.random() < 0.9]
    return Document(opening, " " + " ".join(kept))


def arithmetic_document(random: Random) -> Document:
    """Returns a table of sums, differences or products, or a series; the prompt is its first two lines."""
    start, step = pick_number(random, 1, 30), pick_number(random, 1, 12)
    rows = range(random.randint(6, 12))
    kinds: list[tuple[str, list[str]]] = [
        (f"Add {step} each time:", [f"{start + i * step} + {step} = {start + (i + 1) * step}" for i in rows]),
        (f"Multiply by {step}:", [f"{i + 1} x {step} = {(i + 1) * step}" for i in rows]),
        (f"Add to {start}:", [f"{start} + {i + 1} = {start + i + 1}" for i in rows]),
        (f"Count by {step}:", [str(start + i * step) for i in rows]),
        (f"Subtract from {start + 12}:", [f"{start + 12} - {i + 1} = {start + 11 - i}" for i in rows]),
    ]
    title, lines = pick(random, kinds)
    return Document(f"{title}\n{lines[0]}", "\n" + "\n".join(lines[1:]) + "\nDone.")


GENERATORS: dict[str, Callable[[Random], Document]] = {
    "json": json_document,
    "question_answer": question_answer_document,
    "stories": story_document,
    "arithmetic": arithmetic_document,
    "conversations": conversation_document,
    "tool_calls": tool_call_document,
    "schema_answers": schema_answer_document,
}
