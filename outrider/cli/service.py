"""Address, API key and errors of commands that call a running service."""

import argparse
import sys

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


def explain(error: OutriderError) -> int:
    """Prints what went wrong and what helps, and returns the exit code."""
    advice = ADVICE.get(type(error), "")
    print(f"outrider: {error}{'; ' + advice if advice else ''}", file=sys.stderr)
    return 1
