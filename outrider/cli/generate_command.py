"""``outrider generate "..."``: streams an answer to the terminal; ``--chat`` has a conversation."""

import argparse
import os
import sys
from pathlib import Path

from outrider.cli.answer_output import (
    ALWAYS,
    AUTO,
    NEVER,
    is_coloured,
    print_answer,
    print_legend,
    print_record,
)
from outrider.cli.conversation import HOW, converse
from outrider.cli.options import add_options, read_options
from outrider.cli.service import API_KEY, add_address, exit_code
from outrider.client.client import Client
from outrider.client.fields import GenerateFields, SpeculationFields
from outrider.decoding.settings import RequestedSampling

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")  # settings that are options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", help="text to continue; -, or nothing in a pipe: read it from the standard input"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help=f"the prompt is a message of a chat; without a prompt, a conversation. {HOW}",
    )
    add_address(parser)
    add_options(parser, RequestedSampling, SAMPLING)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; repeatable")
    parser.add_argument("--speculation", dest="mode", choices=("auto", "fixed", "off"), help="[auto]")
    parser.add_argument("--depth", type=int, help="tokens drafted per round under --speculation fixed")
    parser.add_argument("--drafter", help="name of a drafter of the deployment [the deployment's default]")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="longest wait for a lost service, s [60]"
    )
    parser.add_argument("--schema", metavar="FILE", help="JSON schema that the answer follows")
    parser.add_argument(
        "--color",
        choices=(AUTO, ALWAYS, NEVER),
        default=NEVER,
        help="show where each token comes from; auto: if it goes to a terminal [%(default)s]",
    )


def run(options: argparse.Namespace) -> int:
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    fields, prompt = _fields(options), _prompt(options)
    coloured = is_coloured(options.color)
    if coloured:
        print_legend()
    with Client(options.address, os.environ.get(API_KEY), options.patience) as client:
        if prompt is None:
            return converse(client, fields, coloured=coloured)
        if options.chat:
            answer = client.chat([{"role": "user", "content": prompt}], **fields)
        else:
            answer = client.generate(prompt, **fields)
        print_answer(answer, coloured=coloured)
        print_record(answer)
    return 0


def _fields(options: argparse.Namespace) -> GenerateFields:
    """Returns the arguments of the request. Raises ValueError naming an option."""
    sampling = read_options(options, RequestedSampling).model_dump(exclude_unset=True)
    speculation: SpeculationFields = {
        "mode": options.mode,
        "depth": options.depth,
        "drafter": options.drafter,
    }
    fields: GenerateFields = {"stop": options.stop, "speculation": speculation, **sampling}  # type: ignore[typeddict-item]
    if options.schema is not None:
        try:
            fields["structured_outputs"] = {"json": Path(options.schema).read_text(encoding="utf-8")}
        except (OSError, ValueError) as error:
            raise ValueError(f"--schema {options.schema} cannot be read: {error}") from None
    return fields


def _prompt(options: argparse.Namespace) -> str | None:
    """Returns the prompt; None for a conversation, which asks for messages. Raises ValueError."""
    prompt: str | None = options.prompt
    if prompt is None and sys.stdin.isatty():
        if options.chat:
            return None
        raise ValueError("give a prompt, or --chat for a conversation")
    if prompt not in (None, "-"):
        return prompt
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"the standard input is no text in {sys.stdin.encoding}: {error}") from None
