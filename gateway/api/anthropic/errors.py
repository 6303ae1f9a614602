"""Errors in Anthropic's format."""

from gateway.api.anthropic.types import ErrorType, MessageError

TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(status: int, message: str) -> MessageError:
    """Returns the body of an error with that HTTP status."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
