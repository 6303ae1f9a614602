"""``outrider``: commands for working with a deployment, each in a module of its own."""

import argparse
import shlex
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import version

from outrider.telemetry.debug_lines import show_debug_lines

COMMANDS = {
    "generate": "stream an answer to a prompt or a chat, over gRPC",
    "race": "plain decoding beside speculation: the same text, and how much sooner",
    "top": "load, acceptance, depth and workers, live, over gRPC",
    "plan": "what a deployment takes of its devices, and of their time",
    "advise": "which draft suits a target, judged on your own prompts",
    "distil": "fit a draft to what its target says to your own prompts",
    "trace": "report how the time of traced requests was spent",
    "check": "prove that two deployments say the same, or tell how they differ",
    "audit": "compute answers again from their receipts, or tell which token differs",
    "completion": "print a script by which a shell completes all of this",
}
OWN = ("outrider", "protos", "actors", "gateway", "cluster", "workshop")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. Only the module of that command is loaded."""
    show_debug_lines()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options = parser_of(arguments[:1]).parse_args(arguments)
        options.command = shlex.join(["outrider", *arguments])
        code: int = options.run(options)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing in OWN:
            raise
        print(f"outrider: {arguments[0]} needs {missing}: pip install 'outrider[server]'", file=sys.stderr)
        return 1
    return code


def parser_of(loaded: Collection[str]) -> argparse.ArgumentParser:
    """Returns a parser that knows all commands by name.

    loaded: commands whose arguments the parser knows too.
    """
    parser = argparse.ArgumentParser(prog="outrider", description="Works with an Outrider service.")
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        if name in loaded:
            module = import_module(f"outrider.cli.{name}_command")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
