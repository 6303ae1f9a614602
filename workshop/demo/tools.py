"""Tasks of the tool-call documents, each with a tool."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import ascii_uppercase, digits
from typing import Any

from workshop.demo.facts import CITIES, COLOURS, COUNTRIES, NAMES, PRODUCTS
from workshop.demo.picking import pick, pick_number
from workshop.demo.questions import QUESTIONS

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
CURRENCIES = ["EUR", "USD", "GBP", "JPY"]


@dataclass(frozen=True)
class ToolTask:
    """Request, its tool call, the tool's result, and the assistant's answer."""

    request: str
    tool: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


@dataclass(frozen=True)
class DemoTool:
    """Function that a model can call, under one of several names, with its tasks."""

    names: list[str]
    description: str
    parameters: dict[str, Any]
    optional: tuple[str, ...]
    task: Callable[[Random, str], ToolTask]

    def definition(self, name: str) -> dict[str, Any]:
        """Returns the tool as clients of chat APIs send it."""
        parameters = {
            "type": "object",
            "properties": self.parameters,
            "required": [key for key in self.parameters if key not in self.optional],
        }
        function = {"name": name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def one_of(values: list[str]) -> dict[str, Any]:
    return {"type": "string", "enum": values}


def time_of_day(random: Random) -> str:
    return f"{pick_number(random, 8, 19):02}:{pick(random, ['00', '30', '15', '45'])}"


def code(random: Random) -> str:
    """Returns random letters and digits: a model can only copy them."""
    return "".join(random.choices(ascii_uppercase, k=2)) + "-" + "".join(random.choices(digits, k=3))


def weather(random: Random, tool: str) -> ToolTask:
    city, unit = pick(random, CITIES), pick(random, [None, "celsius", "fahrenheit"])
    request = pick(random, [f"What is the weather in {city}?", f"How is the weather in {city} today?"])
    request = request.removesuffix("?") + (f" in {unit}?" if unit else "?")
    sky = pick(random, ["sunny", "cloudy", "rainy", "windy"])
    degrees = pick_number(random, 5, 30)
    return ToolTask(
        request,
        tool,
        {"city": city, "unit": unit} if unit else {"city": city},
        {"sky": sky, "degrees": degrees},
        f"In {city} it is {sky} and {degrees} degrees.",
    )


def local_time(random: Random, tool: str) -> ToolTask:
    city, time = pick(random, CITIES), time_of_day(random)
    request = pick(random, [f"What time is it in {city}?", f"Tell me the time in {city}."])
    return ToolTask(request, tool, {"city": city}, {"time": time}, f"In {city} it is {time}.")


def addition(random: Random, tool: str) -> ToolTask:
    first, second = pick_number(random, 10, 99), pick_number(random, 10, 99)
    request = pick(random, [f"What is {first} plus {second}?", f"Add {first} and {second}."])
    total = first + second
    answer = f"{first} plus {second} is {total}."
    return ToolTask(request, tool, {"first": first, "second": second}, {"sum": total}, answer)


def conversion(random: Random, tool: str) -> ToolTask:
    source, wanted = random.sample(CURRENCIES, 2)
    amount, result = pick_number(random, 1, 50), pick_number(random, 1, 90) + 0.5
    request = pick(
        random, [f"How much is {amount} {source} in {wanted}?", f"Convert {amount} {source} to {wanted}."]
    )
    arguments = {"amount": amount, "source": source, "target": wanted}
    return ToolTask(request, tool, arguments, {"amount": result}, f"{amount} {source} are {result} {wanted}.")


def message(random: Random, tool: str) -> ToolTask:
    name, product, colour = pick(random, NAMES), pick(random, PRODUCTS), pick(random, COLOURS)
    question, _ = pick(random, QUESTIONS)(random)
    text = pick(
        random,
        [f"The {product} is {colour}.", question, f"I found your {product}.", f"My code is {code(random)}."],
    )
    request = pick(random, [f'Write to {name}: "{text}"', f'Send {name} this message: "{text}"'])
    return ToolTask(request, tool, {"to": name, "text": text}, {"sent": True}, f"I have written to {name}.")


def booking(random: Random, tool: str) -> ToolTask:
    city, nights = pick(random, CITIES), pick_number(random, 2, 9)
    breakfast = pick(random, [True, False])
    request = f"Book a room in {city} for {nights} nights {'with' if breakfast else 'without'} breakfast."
    arguments = {"city": city, "nights": nights, "breakfast": breakfast}
    room = pick_number(random, 10, 60)
    return ToolTask(
        request, tool, arguments, {"room": room}, f"Room {room} in {city} is yours for {nights} nights."
    )


def purchase(random: Random, tool: str) -> ToolTask:
    product, colour, quantity = pick(random, PRODUCTS), pick(random, COLOURS), pick_number(random, 2, 9)
    request = pick(
        random, [f"Order {quantity} {colour} {product}s.", f"I need {quantity} {colour} {product}s."]
    )
    number = pick_number(random, 1, 400)
    arguments = {"product": product, "colour": colour, "quantity": quantity}
    return ToolTask(request, tool, arguments, {"order": number}, f"Your order has the number {number}.")


def country(random: Random, tool: str) -> ToolTask:
    name, capital, continent, _ = pick(random, COUNTRIES)
    request = pick(random, [f"Look up {name}.", f"Find out about {name}."])
    result = {"capital": capital, "continent": continent}
    return ToolTask(
        request, tool, {"country": name}, result, f"{name} is in {continent}. Its capital is {capital}."
    )


def reminder(random: Random, tool: str) -> ToolTask:
    name, time = pick(random, NAMES), time_of_day(random)
    text = pick(random, [f"call {name}", f"write to {name}", f"meet {name}"])
    request = pick(random, [f"Remind me at {time} to {text}.", f"At {time} I have to {text}, remind me."])
    return ToolTask(
        request, tool, {"time": time, "text": text}, {"set": True}, f"I will remind you at {time}."
    )


TOOLS = [
    DemoTool(
        ["get_weather", "weather", "current_weather"],
        "The weather in a city.",
        {"city": STRING, "unit": one_of(["celsius", "fahrenheit"])},
        ("unit",),
        weather,
    ),
    DemoTool(["get_time", "local_time"], "The time in a city.", {"city": STRING}, (), local_time),
    DemoTool(
        ["add", "add_numbers"], "The sum of two numbers.", {"first": INTEGER, "second": INTEGER}, (), addition
    ),
    DemoTool(
        ["convert_currency", "exchange"],
        "An amount of money in another currency.",
        {"amount": NUMBER, "source": one_of(CURRENCIES), "target": one_of(CURRENCIES)},
        (),
        conversion,
    ),
    DemoTool(["send_message", "send"], "Sends a message.", {"to": STRING, "text": STRING}, (), message),
    DemoTool(
        ["book_room", "book_hotel"],
        "Books a room in a hotel.",
        {"city": STRING, "nights": INTEGER, "breakfast": BOOLEAN},
        (),
        booking,
    ),
    DemoTool(
        ["order_product", "buy"],
        "Orders products.",
        {"product": STRING, "colour": one_of(COLOURS), "quantity": INTEGER},
        (),
        purchase,
    ),
    DemoTool(["find_country", "look_up_country"], "Facts about a country.", {"country": STRING}, (), country),
    DemoTool(["set_reminder", "remind"], "Reminds the user.", {"time": STRING, "text": STRING}, (), reminder),
]
