"""Address and API key of a running service, and exit codes of all commands."""

import argparse
import sys
from collections.abc import Callable

from outrider.client.errors import (
    AuthenticationError,
    OutriderError,
    ServiceOverloadedError,
    ServiceUnavailableError,
)

API_KEY = "OUTRIDER_API_KEY"
INTERRUPTED = 130  # exit code
ADVICE: dict[type[OutriderError], str] = {
    ServiceUnavailableError: "is it running? `make serve` starts it, --address says where it is",
    AuthenticationError: f"put an API key into {API_KEY}",
    ServiceOverloadedError: "the service is full: try again later",
}


def add_address(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--address``."""
    parser.add_argument("--address", default="127.0.0.1:9000", help="host:port of the gRPC API [%(default)s]")


def exit_code(
    command: Callable[[], int], failures: tuple[type[Exception], ...] = (ValueError, OSError), failed: int = 1
) -> int:
    """Runs a command and returns its exit code. A known failure prints its reason to stderr.

    Args:
        failures: known failures, besides the errors of a running service.
        failed: exit code of a known failure.
    """
    try:
        return command()
    except OutriderError as error:
        return explain(error)
    except failures as error:
        print(f"outrider: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        return INTERRUPTED


def explain(error: OutriderError) -> int:
    """Prints an error and advice, and returns the exit code."""
    advice = ADVICE.get(type(error), "")
    print(f"outrider: {error}{'; ' + advice if advice else ''}", file=sys.stderr)
    return 1
