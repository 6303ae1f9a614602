"""Errors of requests, each with its status in HTTP and in gRPC."""

from collections.abc import Callable
from typing import Self

from grpc import StatusCode

DEFECT = "a defect of the gateway, whose log tells more"  # message to callers for an error of any other type


class GatewayError(Exception):
    """Base of the errors that the APIs turn into a response; any other exception is a defect."""

    http_status: int
    grpc_status: StatusCode


class InvalidRequestError(GatewayError):
    """The request is invalid.

    ``field`` is the field's name in the request; the message says what is accepted.
    """

    http_status, grpc_status = 400, StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both arguments, so that Serve's proxy can unpickle the error
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"

    def renamed(self, own_name: Callable[[str], str]) -> Self:
        """Returns the error of an API that has another name for the field."""
        return type(self)(own_name(self.field), self.message)


class TooLongError(InvalidRequestError):
    """The prompt, or the prompt with the requested answer, is longer than the context."""


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served."""

    http_status, grpc_status = 404, StatusCode.NOT_FOUND


class UnknownResponseError(InvalidRequestError):
    """The path names a response that is not stored."""

    http_status, grpc_status = 404, StatusCode.NOT_FOUND


class UnauthenticatedError(GatewayError):
    """The caller presented no API key, or an unknown key, though a key is required."""

    http_status, grpc_status = 401, StatusCode.UNAUTHENTICATED


class ForbiddenError(GatewayError):
    """The settings allow no caller to do what the request asks for."""

    http_status, grpc_status = 403, StatusCode.PERMISSION_DENIED


class OverloadedError(GatewayError):
    """All permits are in use, and the queue is full."""

    http_status, grpc_status = 429, StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class LimitReachedError(OverloadedError):
    """A limit of the caller's tenant is reached."""

    def __init__(self, limit: str, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.args = limit, message, retry_after_s  # so that Serve's proxy can unpickle the error
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[1])


class DeadlineError(GatewayError):
    """The answer was not complete before the request's deadline."""

    http_status, grpc_status = 504, StatusCode.DEADLINE_EXCEEDED


class GenerationFailedError(GatewayError):
    """A target's engine could not continue the sequence, or too many targets were lost while they held it."""

    http_status, grpc_status = 500, StatusCode.INTERNAL


class WorkerLostError(GatewayError):
    """A stream to a worker could not be opened, or ended before its sequence did."""

    http_status, grpc_status = 503, StatusCode.UNAVAILABLE


class SequenceLostError(WorkerLostError):
    """The worker was lost (not drained) while it may have held the sequence, which may be the cause."""


class ParkedError(WorkerLostError):
    """The stream was closed because the request is parked: an urgent request has its permit for a while."""
