"""Errors of requests, each with its status in HTTP and in gRPC."""

from grpc import StatusCode

DEFECT = "a defect of the gateway, whose log tells more"  # message to callers for any other exception


class GatewayError(Exception):
    """Base of errors that the APIs turn into an answer; any other exception is a defect."""

    http_status: int
    grpc_status: StatusCode


class InvalidRequestError(GatewayError):
    """The request is wrong: ``field`` is its own name of the field, the message says what is accepted."""

    http_status, grpc_status = 400, StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that Serve's proxy can unpickle it
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class TooLongError(InvalidRequestError):
    """The prompt, or the answer that it asks for, is longer than the context."""


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served."""

    http_status, grpc_status = 404, StatusCode.NOT_FOUND


class UnknownResponseError(InvalidRequestError):
    """The path names a response that is not kept."""

    http_status, grpc_status = 404, StatusCode.NOT_FOUND


class UnauthenticatedError(GatewayError):
    """The caller presented no API key, or an unknown key, though a key is required."""

    http_status, grpc_status = 401, StatusCode.UNAUTHENTICATED


class ForbiddenError(GatewayError):
    """The settings keep every caller from what was asked for."""

    http_status, grpc_status = 403, StatusCode.PERMISSION_DENIED


class OverloadedError(GatewayError):
    """All permits are given, and the queue is full."""

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
        self.args = limit, message, retry_after_s  # so that Serve's proxy can unpickle it
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[1])


class DeadlineError(GatewayError):
    """The answer was not finished within the deadline of requests."""

    http_status, grpc_status = 504, StatusCode.DEADLINE_EXCEEDED


class GenerationFailedError(GatewayError):
    """A target's engine failed the sequence, or too many targets were lost while they had it."""

    http_status, grpc_status = 500, StatusCode.INTERNAL


class WorkerLostError(GatewayError):
    """A stream to a worker ended before its sequence did, or could not be opened."""

    http_status, grpc_status = 503, StatusCode.UNAVAILABLE


class SequenceLostError(WorkerLostError):
    """The worker was lost, not drained, while it may have had the sequence, which may be the reason."""


class ParkedError(WorkerLostError):
    """The stream was closed because the request lost its permit to a more urgent request, for a while."""
