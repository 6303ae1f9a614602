"""Errors of the client, which replace the errors of gRPC.

OutriderError                base, and any error without a class below: a defect of the service
├── BadRequestError          the request is wrong; ``field`` says where
├── AuthenticationError      an API key is missing or unknown, or no caller may ask for this
├── ServiceOverloadedError   the queue is full; ``retry_after_s`` says when to ask again
├── DeadlineExceededError    the answer was not finished within the time limit of the service
└── ServiceUnavailableError  no gateway, or no target, can be reached
"""

import re
from typing import Any

import grpc

RETRY_DELAY = "retry-after-ms"  # trailing metadata of a gateway whose queue is full
# Serve's proxy answers INTERNAL for a lost gateway and for a defect: only Ray's message differs.
LOST_GATEWAY = ("actor died", "actor is temporarily unavailable", "Actor is unavailable")
FIELD = re.compile(r"([a-z_][\w.]*): ")  # beginning of a message about a wrong field


class OutriderError(Exception):
    """Base of all errors of the client."""


class BadRequestError(OutriderError):
    """The request is wrong. field: name of the wrong field; None: no single field is wrong."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class AuthenticationError(OutriderError):
    """The service does not answer this caller."""


class ServiceOverloadedError(OutriderError):
    """The service has no room. retry_after_s: seconds after which to ask again; None: unknown."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(OutriderError):
    """The answer took longer than the service allows."""


class ServiceUnavailableError(OutriderError):
    """The service cannot be reached, or was lost."""


PLAIN_KINDS = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailableError,
}


def error_of(error: grpc.RpcError) -> OutriderError:
    """Returns the client's error for an error of gRPC."""
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.NOT_FOUND:
            named = FIELD.match(details)
            return BadRequestError(details, None if named is None else named[1])
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            metadata: Any = error.trailing_metadata() or ()
            delay_ms = dict(metadata).get(RETRY_DELAY)
            return ServiceOverloadedError(details, None if delay_ms is None else float(delay_ms) / 1e3)
        case grpc.StatusCode.INTERNAL if any(words in details for words in LOST_GATEWAY):
            return ServiceUnavailableError(details)
    return PLAIN_KINDS.get(code, OutriderError)(details or code.name)
