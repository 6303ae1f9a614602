"""``outrider``: one command for each thing to do with a deployment, one module for each command."""

import argparse
import sys

from outrider.cli import (
    advise_command,
    check_command,
    distil_command,
    generate_command,
    plan_command,
    top_command,
    trace_command,
)

COMMANDS = (
    generate_command,
    top_command,
    plan_command,
    advise_command,
    distil_command,
    trace_command,
    check_command,
)


def main(arguments: list[str] | None = None) -> int:
    """What the chosen command returns: the exit code."""
    parser = argparse.ArgumentParser(prog="outrider", description="Works with an Outrider service.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
