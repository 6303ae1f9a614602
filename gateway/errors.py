"""Errors of a request, and the status that each API gives them.

GatewayError
├── InvalidRequestError      the request itself: 400, INVALID_ARGUMENT
│   └── UnknownModelError    404, NOT_FOUND
├── UnauthenticatedError     no valid API key: 401, UNAUTHENTICATED
├── OverloadedError          the queue is full: 429, RESOURCE_EXHAUSTED, with a delay
├── DeadlineError            not finished in time: 504, DEADLINE_EXCEEDED
├── GenerationFailedError    no target can go on with it: 500, INTERNAL
└── WorkerLostError          no worker, or its stream broke: 503, UNAVAILABLE
    └── SequenceLostError    it broke when the worker had taken the sequence
"""

DEFECT = "a defect of the gateway, whose log tells more"  # message to callers for any other exception


class GatewayError(Exception):
    """Base of the errors that the APIs turn into an answer; anything else is a defect of ours."""


class InvalidRequestError(GatewayError):
    """``field`` is the request's own name of the wrong field; the message has the accepted values."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that Serve's proxy can unpickle it
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here."""


class UnauthenticatedError(GatewayError):
    """The caller presented no API key, or an unknown key, though a key is required."""


class OverloadedError(GatewayError):
    """All places and the queue are full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineError(GatewayError):
    """The answer was not finished within the deadline of requests."""


class GenerationFailedError(GatewayError):
    """A target's engine failed the sequence, or too many targets were lost while they had it."""


class WorkerLostError(GatewayError):
    """A stream to a worker ended before its sequence did, or could not be opened."""


class SequenceLostError(WorkerLostError):
    """The worker was lost, not drained, while it had the sequence, which may have been the reason."""
