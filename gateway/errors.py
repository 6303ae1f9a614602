"""What can go wrong with a request, and how each API says so.

GatewayError
├── InvalidRequestError      the request itself: 400, INVALID_ARGUMENT
│   └── UnknownModelError    404, NOT_FOUND
└── WorkerLostError          no worker, or its stream broke: 503, UNAVAILABLE
"""


class GatewayError(Exception):
    """Base of what the APIs turn into an answer; anything else is a defect of ours."""


class InvalidRequestError(GatewayError):
    """``field`` is the request's own name for what is wrong; the message says what would be accepted."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that Serve's proxy can unpickle it
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served here."""


class WorkerLostError(GatewayError):
    """A stream to a worker ended before its sequence did, or could not be opened."""
