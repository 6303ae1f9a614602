"""``outrider generate "..."``: streams an answer to the terminal."""

import argparse
import os
import sys
from pathlib import Path

import grpc

from outrider.cli.options import add_options, read_options
from outrider.cli.service import API_KEY, INTERRUPTED, add_address, explain
from outrider.client.client import Answer, Client
from outrider.decoding.settings import RequestedSampling

COLOURS = {"accepted": "\033[32m", "forced": "\033[36m", "target": "\033[33m", "plain": ""}
RESET = "\033[0m"
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")  # settings that are options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text to continue; -: read it from the standard input")
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
    parser.add_argument("--color", action="store_true", help="show where each token comes from")


def run(options: argparse.Namespace) -> int:
    speculation = {
        name: getattr(options, name)
        for name in ("mode", "depth", "drafter")
        if getattr(options, name) is not None
    }
    try:
        sampling = read_options(options, RequestedSampling).model_dump(exclude_unset=True)
    except ValueError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    try:
        form = None if options.schema is None else {"json": Path(options.schema).read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        print(f"outrider: --schema {options.schema} cannot be read: {error}", file=sys.stderr)
        return 1
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as error:
        print(f"outrider: the standard input is no text in {sys.stdin.encoding}: {error}", file=sys.stderr)
        return 1
    with Client(options.address, os.environ.get(API_KEY), options.patience) as client:
        answer = client.generate(prompt, tuple(options.stop), speculation, form, **sampling)
        try:
            _print(answer, colour=options.color)
        except grpc.RpcError as error:
            return explain(error)
        except KeyboardInterrupt:
            print(RESET if options.color else "", file=sys.stderr)
            return INTERRUPTED
    return 0


def _print(answer: Answer, colour: bool) -> None:
    if colour:
        legend = ", ".join(f"{code}{origin}{RESET if code else ''}" for origin, code in COLOURS.items())
        print(f"tokens: {legend}", file=sys.stderr)
    for piece in answer:
        code = COLOURS[piece.origin] if colour else ""
        print(f"{code}{piece.text}{RESET if code else ''}", end="", flush=True)
    print()
    assert answer.usage is not None
    record = answer.usage.speculation
    print(
        f"{answer.usage.completion_tokens} tokens in {record.target_passes} passes of the target, "
        f"{record.accepted} of {record.drafted} drafted accepted, "
        f"{f'{record.forced} forced, ' if record.forced else ''}seed {answer.seed}, {answer.finish_reason}",
        file=sys.stderr,
    )
