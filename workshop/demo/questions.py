"""Questions with answers from the tables of facts."""

from random import Random

from workshop.demo.facts import ANIMALS, BUILTINS, COUNTRIES, NUMBER_WORDS, OPPOSITES, THINGS
from workshop.demo.picking import pick, pick_number


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
