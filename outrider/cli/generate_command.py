"""``outrider generate "..."``: streams an answer to the terminal."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import grpc

from outrider.client.client import Answer, Client

API_KEY = "OUTRIDER_API_KEY"
COLOURS = {"accepted": "\033[32m", "forced": "\033[36m", "target": "\033[33m", "plain": ""}
RESET = "\033[0m"
INTERRUPTED = 130  # exit code
ADVICE = {
    grpc.StatusCode.UNAVAILABLE: "is it running? `make serve` starts it, --address says where it is",
    grpc.StatusCode.UNAUTHENTICATED: f"put an API key into {API_KEY}",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "the service is full: try again later",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "--address": {"default": "127.0.0.1:9000", "help": "host:port of the gRPC API [%(default)s]"},
    "--max-tokens": {"type": int, "help": "tokens after which the answer ends [16]"},
    "--temperature": {"type": float, "help": "0 chooses the likeliest token [1]"},
    "--top-p": {"type": float, "help": "keep the smallest set with this mass [1]"},
    "--top-k": {"type": int, "help": "keep the k likeliest tokens [all]"},
    "--seed": {"type": int, "help": "the same seed gives the same text [one is drawn]"},
    "--stop": {"action": "append", "default": [], "help": "the text ends before it; may be repeated"},
    "--speculation": {"dest": "mode", "choices": ("auto", "fixed", "off"), "help": "[auto]"},
    "--depth": {"type": int, "help": "tokens drafted per round under --speculation fixed"},
    "--drafter": {"help": "name of a drafter that the deployment has [the deployment's]"},
    "--patience": {"type": float, "default": 60.0, "help": "seconds to wait for a lost service [60]"},
    "--schema": {"metavar": "FILE", "help": "a JSON schema that the answer follows"},
    "--color": {"action": "store_true", "help": "show where each token comes from"},
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("generate", help="stream an answer to a prompt, over gRPC")
    parser.add_argument("prompt")
    for name, settings in OPTIONS.items():
        parser.add_argument(name, **settings)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    given = {
        name: getattr(options, name)
        for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")
        if getattr(options, name) is not None
    }
    speculation = {
        name: getattr(options, name)
        for name in ("mode", "depth", "drafter")
        if getattr(options, name) is not None
    }
    try:
        form = None if options.schema is None else {"json": Path(options.schema).read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        print(f"outrider: --schema {options.schema} cannot be read: {error}", file=sys.stderr)
        return 1
    with Client(options.address, os.environ.get(API_KEY), options.patience) as client:
        answer = client.generate(options.prompt, tuple(options.stop), speculation, form, **given)
        try:
            _print(answer, colour=options.color)
        except grpc.RpcError as error:
            return explain(error)
        except KeyboardInterrupt:
            print(RESET if options.color else "", file=sys.stderr)
            return INTERRUPTED
    return 0


def explain(error: grpc.RpcError) -> int:
    """Says what went wrong and what helps; the exit code."""
    advice = ADVICE.get(error.code(), "")
    print(f"\noutrider: {error.details()}{'; ' + advice if advice else ''}", file=sys.stderr)
    return 1


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
