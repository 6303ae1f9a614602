"""``outrider completion bash``: prints the script by which a shell completes commands and options."""

import argparse

import shtab

from outrider.cli.command_line import COMMANDS, parser_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = 'bash: eval "$(outrider completion bash)"'
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)


def run(options: argparse.Namespace) -> int:
    print(shtab.complete(parser_of([*COMMANDS]), options.shell))
    return 0
