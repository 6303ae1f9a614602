"""Documents of the kinds that are written by a program: JSON, question/answer, stories, arithmetic.

Each generator returns a prompt and the continuation that belongs to it.
"""

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from outrider.demo.facts import (
    ANIMALS,
    BUILTINS,
    COLOURS,
    COUNTRIES,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    PRODUCTS,
    THINGS,
)
from outrider.demo.picking import pick, pick_number
from outrider.demo.records import RECORDS


class Document(NamedTuple):
    """A text in two parts; held-out prompts are told from training text by their first part."""

    prompt: str
    continuation: str


def json_document(random: Random) -> Document:
    """A record of one of four types; the prompt is its first three to five lines."""
    record = pick(random, RECORDS)(random)
    lines = json.dumps(record, indent=2).split("\n")
    cut = random.randint(3, 5)
    return Document("\n".join(lines[:cut]), "\n" + "\n".join(lines[cut:]))


def country_question(random: Random) -> tuple[str, str]:
    country, capital, continent, language = pick(random, COUNTRIES)
    facts = {
        f"What is the capital of {country}?": f"The capital of {country} is {capital}.",
        f"Where is {country}?": f"{country} is a country in {continent}.",
        f"Which language do people speak in {country}?": f"Most people in {country} speak {language}.",
        f"Tell me about {country}.": f"{country} is a country in {continent}. Its capital is {capital}.",
        f"Which city is the capital of {country}?": f"The capital of {country} is {capital}.",
    }
    question, answer = pick(random, list(facts.items()))
    rest = f" {country} lies in {continent}, its capital is {capital}, and its main language is {language}."
    return question, answer + rest


def animal_question(random: Random) -> tuple[str, str]:
    animal, legs, home, food = pick(random, ANIMALS)
    facts = {
        f"How many legs does a {animal} have?": f"A {animal} has {legs} legs.",
        f"Where does a {animal} live?": f"A {animal} lives in {home}.",
        f"What does a {animal} eat?": f"A {animal} eats {food}.",
        f"Tell me about the {animal}.": f"A {animal} is an animal with {legs} legs.",
    }
    question, answer = pick(random, list(facts.items()))
    return question, f"{answer} It lives in {home} and likes to eat {food}."


def word_question(random: Random) -> tuple[str, str]:
    word, opposite = pick(random, OPPOSITES)
    if random.random() < 0.5:
        word, opposite = opposite, word
    question = pick(random, [f"What is the opposite of {word}?", f"Which word means the opposite of {word}?"])
    return (
        question,
        f"The opposite of {word} is {opposite}. If something is not {word}, it may be {opposite}.",
    )


def colour_question(random: Random) -> tuple[str, str]:
    thing, colour, place = pick(random, THINGS)
    question = pick(random, [f"What colour is {thing}?", f"Can you tell me the colour of {thing}?"])
    return question, f"{thing.capitalize()} is {colour}. You can find it {place}."


def python_question(random: Random) -> tuple[str, str]:
    name, purpose, example = pick(random, BUILTINS)
    question = pick(random, [f"What does {name} do in Python?", f"How do I use {name} in Python?"])
    return question, f"In Python, the function {name} {purpose}. For example, you can write {example}."


def sum_question(random: Random) -> tuple[str, str]:
    first, second = pick_number(random, 1, 10), pick_number(random, 1, 10)
    left, right, total = NUMBER_WORDS[first], NUMBER_WORDS[second], NUMBER_WORDS[first + second]
    question = pick(random, [f"What is {left} plus {right}?", f"Can you add {left} and {right}?"])
    return question, f"The answer is {total}, because {left} plus {right} makes {total}."


QUESTIONS = [
    country_question,
    animal_question,
    python_question,
    word_question,
    colour_question,
    sum_question,
]


def question_answer_document(random: Random) -> Document:
    """A chat of one to three turns in the pair's chat format; the prompt ends where the answer starts."""
    turns = [pick(random, QUESTIONS)(random) for _ in range(pick_number(random, 1, 3))]
    (question, answer), *others = turns
    rest = "".join(f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>" for question, answer in others)
    return Document(f"<|user|>{question}<|end|><|assistant|>", f"{answer}<|end|>{rest}")


def story_document(random: Random) -> Document:
    """A short story about an animal with a name; the prompt is its first three sentences."""
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
    """A table of sums, differences or products, or a number series; the prompt is its first two lines."""
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
}
