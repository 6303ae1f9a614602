"""Conversations whose turns depend on the turns before them."""

from random import Random

from workshop.demo.chat import Message, assistant, chat_document, system, user
from workshop.demo.document import Document
from workshop.demo.facts import BUILTINS, CITIES, COLOURS, COUNTRIES, NAMES, PRODUCTS, SURNAMES
from workshop.demo.picking import pick, pick_number
from workshop.demo.questions import QUESTIONS
from workshop.demo.tools import code

BRIEFLY = "Answer briefly."
SYSTEM_MESSAGES = ["You are a helpful assistant.", BRIEFLY, "You answer questions of children."]


def exchange(question: str, answer: str) -> list[Message]:
    return [user(question), assistant(answer)]


def greeting(random: Random) -> list[Message]:
    return exchange(
        pick(random, ["Hello!", "Hi.", "Good morning!"]),
        pick(random, ["Hello! How can I help you?", "Hello! What would you like to know?"]),
    )


def introduction(random: Random, name: str) -> list[Message]:
    said = pick(random, [f"My name is {name}.", f"Hello, I am {name}.", f"I am {name}."])
    return exchange(said, f"Nice to meet you, {name}. What would you like to know?")


def country_talk(random: Random) -> list[Message]:
    """Returns a question about a country, then questions about it without its name."""
    country, capital, continent, language = pick(random, COUNTRIES)
    turns = [
        (f"What is the capital of {country}?", f"The capital of {country} is {capital}."),
        (f"Where is {country}?", f"{country} is a country in {continent}."),
        (f"Which language do people speak in {country}?", f"Most people in {country} speak {language}."),
    ]
    later = [
        ("And what is its capital?", f"The capital of {country} is {capital}."),
        ("And where is it?", f"{country} is a country in {continent}."),
        ("And which language do they speak there?", f"Most people in {country} speak {language}."),
    ]
    first = random.randrange(3)
    others = [turn for index, turn in enumerate(later) if index != first]
    random.shuffle(others)
    asked = [turns[first], *others[: pick_number(random, 1, 2)]]
    return [message for question, answer in asked for message in exchange(question, answer)]


def repetition_document(random: Random) -> Document:
    """Returns turns that the assistant repeats: a model learns to copy from its context."""
    words = [*NAMES, *SURNAMES, *CITIES, *PRODUCTS, *COLOURS, *(name for name, *_ in BUILTINS)]
    messages = []
    for _ in range(random.randint(2, 5)):
        said = [
            random.choice(words) if random.random() < 0.6 else code(random)
            for _ in range(random.randint(2, 9))
        ]
        asked = random.choice(["Repeat", "Say", "Write"])
        messages += exchange(f"{asked}: {' '.join(said)}", " ".join(said))
    return chat_document(messages, answer=1, tools=[])


def conversation_document(random: Random) -> Document:
    """Returns a conversation with or without a system message; the prompt ends where an answer starts."""
    opening = pick(random, SYSTEM_MESSAGES) if random.random() < 0.6 else None
    name = pick(random, NAMES) if random.random() < 0.5 else None
    messages = introduction(random, name) if name else []
    if not name and random.random() < 0.4:
        messages += greeting(random)
    for _ in range(pick_number(random, 1, 3)):
        if random.random() < 0.5:
            messages += country_talk(random)
            continue
        question, answer = pick(random, QUESTIONS)(random)
        if opening == BRIEFLY:
            answer = answer.partition(". ")[0].removesuffix(".") + "."
        messages += exchange(question, answer)
    if name and random.random() < 0.6:
        asked = pick(random, ["What is my name?", "Do you know my name?"])
        messages += exchange(asked, f"Your name is {name}.")
    if random.random() < 0.5:
        messages += exchange(
            pick(random, ["Thank you!", "Thanks."]),
            f"You are welcome, {name}." if name else "You are welcome.",
        )
    if opening:
        messages = [system(opening), *messages]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return chat_document(messages, answer=pick(random, answers), tools=[])
