"""Conversation in a terminal: ``outrider generate --chat``."""

import sys

from outrider.cli.answer_output import print_answer
from outrider.cli.service import explain
from outrider.client.client import Client
from outrider.client.errors import OutriderError
from outrider.client.fields import GenerateFields, MessageFields

HOW = "Ctrl-C ends an answer, Ctrl-D ends the chat."


def converse(client: Client, fields: GenerateFields, *, coloured: bool) -> int:
    """Asks for messages and prints the answers, until the input ends. Returns the exit code.

    A message whose answer fails or is interrupted before its first token is dropped from the conversation.
    """
    import readline  # noqa: F401  input() then edits its line, and remembers earlier lines

    messages: list[MessageFields] = []
    print(HOW, file=sys.stderr)
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if not said.strip():
            continue
        asked: list[MessageFields] = [*messages, {"role": "user", "content": said}]
        try:
            answer = client.chat(asked, **fields)
            print_answer(answer, coloured=coloured)
        except OutriderError as error:
            explain(error)
            continue
        except KeyboardInterrupt:
            pass
        if answer.pieces:
            messages = [*asked, {"role": "assistant", "content": answer.text}]
