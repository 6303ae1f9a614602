"""``outrider``: a command for each thing to do with a deployment, a module for each command."""

import argparse
import shlex
import sys
from importlib import import_module
from importlib.metadata import version

COMMANDS = {
    "generate": "stream an answer to a prompt, over gRPC",
    "race": "plain decoding beside speculation: the same text, and how much sooner",
    "top": "load, acceptance, depth and workers, live, over gRPC",
    "plan": "what a deployment takes of its devices, and of their time",
    "advise": "which draft suits a target, judged on your own prompts",
    "distil": "fit a draft to what its target says to your own prompts",
    "trace": "report how the time of traced requests was spent",
    "check": "prove that two deployments say the same, or tell how they differ",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code. Only the module of that command is loaded."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="outrider", description="Works with an Outrider service.")
    parser.add_argument("--version", action="version", version=f"outrider {version('outrider')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning)
        if arguments[:1] == [name]:
            module = import_module(f"outrider.cli.{name}_command")
            module.add_arguments(command)
            command.set_defaults(run=module.run, command=shlex.join(["outrider", *arguments]))
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
