"""Chats in which the assistant puts given facts into JSON of a given schema."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from workshop.demo.chat import assistant, chat_document, system, user
from workshop.demo.document import Document
from workshop.demo.facts import ANIMALS, CITIES, COLOURS, COUNTRIES, NAMES, NUMBER_WORDS, PRODUCTS, SURNAMES
from workshop.demo.picking import pick, pick_number
from workshop.demo.tools import BOOLEAN, INTEGER, NUMBER, STRING, code, one_of

STATES = ["paid", "shipped", "open", "returned"]
STRINGS = {"type": "array", "items": STRING}


@dataclass(frozen=True)
class Fact:
    """Property of a subject: its JSON schema, its value and its wording."""

    name: str
    schema: dict[str, Any]
    value: Any
    words: str


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def person(random: Random) -> tuple[str, Fact, list[Fact]]:
    first = pick(random, NAMES)
    name, city = f"{first} {pick(random, SURNAMES)}", pick(random, CITIES)
    age, floor = pick_number(random, 20, 60), pick_number(random, 1, 9)
    active = pick(random, [True, False])
    pet = pick(random, [animal for animal, *_ in ANIMALS])
    badge = code(random)
    likes = random.sample(COLOURS, pick_number(random, 1, 3))
    address = object_schema({"city": STRING, "floor": INTEGER})
    facts = [
        Fact("age", INTEGER, age, f"is {age} years old"),
        Fact("city", STRING, city, f"works in {city}"),
        Fact("address", address, {"city": city, "floor": floor}, f"lives in {city} on floor {floor}"),
        Fact("email", STRING, f"{first.lower()}@example.com", f"has the address {first.lower()}@example.com"),
        Fact("active", BOOLEAN, active, "is active" if active else "is not active"),
        Fact("badge", STRING, badge, f"wears the badge {badge}"),
        Fact("pet", STRING, pet, f"has a {pet}"),
        Fact("colours", STRINGS, likes, f"likes {', '.join(likes)}"),
    ]
    return name, Fact("name", STRING, name, ""), facts


def order(random: Random) -> tuple[str, Fact, list[Fact]]:
    number, customer, product = pick_number(random, 1, 400), pick(random, NAMES), pick(random, PRODUCTS)
    quantity, price = pick_number(random, 1, 9), pick_number(random, 1, 40) + 0.5
    colour, state = pick(random, COLOURS), pick(random, STATES)
    parcel = code(random)
    express = pick(random, [False, True])
    items = [
        {"product": other, "quantity": pick_number(random, 1, 9)}
        for other in random.sample(PRODUCTS, pick_number(random, 1, 3))
    ]
    listed = ", ".join(f"{item['quantity']} x {item['product']}" for item in items)
    item_schema = {"type": "array", "items": object_schema({"product": STRING, "quantity": INTEGER})}
    facts = [
        Fact("customer", STRING, customer, f"is from {customer}"),
        Fact("product", STRING, product, f"is about a {product}"),
        Fact("quantity", INTEGER, quantity, f"has {quantity} parcels"),
        Fact("price", NUMBER, price, f"costs {price} EUR"),
        Fact("status", one_of(STATES), state, f"is {state}"),
        Fact("colour", one_of(COLOURS), colour, f"comes in {colour}"),
        Fact("express", BOOLEAN, express, "is express" if express else "is not express"),
        Fact("parcel", STRING, parcel, f"travels as {parcel}"),
        Fact("items", item_schema, items, f"lists {listed}"),
    ]
    return f"Order {number}", Fact("id", INTEGER, number, ""), facts


def country(random: Random) -> tuple[str, Fact, list[Fact]]:
    name, capital, continent, language = pick(random, COUNTRIES)
    facts = [
        Fact("capital", STRING, capital, f"has the capital {capital}"),
        Fact("continent", STRING, continent, f"lies in {continent}"),
        Fact("language", STRING, language, f"speaks {language}"),
    ]
    return name, Fact("country", STRING, name, ""), facts


def animal(random: Random) -> tuple[str, Fact, list[Fact]]:
    name, legs, home, food = pick(random, ANIMALS)
    facts = [
        Fact("legs", INTEGER, NUMBER_WORDS.index(legs), f"has {legs} legs"),
        Fact("home", STRING, home, f"lives in {home}"),
        Fact("food", STRING, food, f"eats {food}"),
    ]
    return f"The {name}", Fact("animal", STRING, name, ""), facts


SUBJECTS: list[Callable[[Random], tuple[str, Fact, list[Fact]]]] = [person, order, country, animal]


def schema_answer_document(random: Random) -> Document:
    """Returns a chat with facts about a subject and a schema for some; the prompt ends before the JSON.

    Some chats ask for JSON without a schema: then the answer has all facts.
    """
    subject, identity, others = pick(random, SUBJECTS)(random)
    told = random.sample(others, random.randint(2, min(5, len(others))))
    clauses = [fact.words for fact in told]
    sentence = f"{subject} {', '.join(clauses[:-1])} and {clauses[-1]}."
    if random.random() < 0.15:
        wanted, task = [identity, *told], "Answer in JSON."
    else:
        wanted = random.sample([identity, *told], random.randint(2, 1 + len(told)))
        schema = object_schema({fact.name: fact.schema for fact in wanted})
        task = f"Answer in JSON of this schema: {json.dumps(schema)}"
    answer = assistant(json.dumps({fact.name: fact.value for fact in wanted}))
    if random.random() < 0.5:
        return chat_document([system(task), user(sentence), answer], answer=2, tools=[])
    return chat_document([user(f"{sentence}\n{task}"), answer], answer=1, tools=[])
