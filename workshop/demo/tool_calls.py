"""Chats in which the assistant calls tools."""

import json
from random import Random

from workshop.demo.chat import Message, assistant, chat_document, system, user
from workshop.demo.document import Document
from workshop.demo.picking import pick, pick_number
from workshop.demo.questions import QUESTIONS
from workshop.demo.tools import TOOLS, ToolTask

SYSTEM_MESSAGES = ["You are a helpful assistant.", "Use the tools."]


def calls(tasks: list[ToolTask]) -> Message:
    functions = [{"name": task.tool, "arguments": task.arguments} for task in tasks]
    requested = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": requested}


def results(tasks: list[ToolTask]) -> list[Message]:
    return [{"role": "tool", "content": json.dumps(task.result)} for task in tasks]


def turn(tasks: list[ToolTask]) -> list[Message]:
    """Returns the messages of one request for some tasks: the calls, their results, and the answer."""
    request, answer = (
        " ".join(parts) for parts in zip(*((task.request, task.answer) for task in tasks), strict=True)
    )
    return [user(request), calls(tasks), *results(tasks), assistant(answer)]


def tool_call_document(random: Random) -> Document:
    """Returns a chat of one or two turns with one to three tools; the prompt ends where an answer starts.

    Some turns need no tool, others two calls at once.
    """
    offered = random.sample(TOOLS, pick_number(random, 1, 3))
    names = [pick(random, tool.names) for tool in offered]
    messages = [system(pick(random, SYSTEM_MESSAGES))] if random.random() < 0.4 else []
    for _ in range(pick_number(random, 1, 2)):
        if random.random() < 0.15:
            question, answer = pick(random, QUESTIONS)(random)
            messages += [user(question), assistant(answer)]
            continue
        chosen = random.randrange(len(offered))
        count = 2 if random.random() < 0.2 else 1
        messages += turn([offered[chosen].task(random, names[chosen]) for _ in range(count)])
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    tools = [tool.definition(name) for tool, name in zip(offered, names, strict=True)]
    return chat_document(messages, answer=pick(random, answers), tools=tools)
