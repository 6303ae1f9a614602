"""Log lines of refused calls: one line each, since the caller knows the reason and nothing is defective."""

import logging

from gateway.errors import GatewayError

logger = logging.getLogger("ray.serve")  # Serve logs each exception of a gRPC method with it


class _Refusals(logging.Filter):
    """Removes traceback and text of refusals from the log: they could hold parts of a prompt."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        error = getattr(error, "original_exception", error)  # Serve wraps what has a status code
        if isinstance(error, GatewayError):
            line = f"{record.getMessage()} {type(error).__name__}"
            vars(record).update(msg=line, args=(), exc_info=None, exc_text=None)
        return True


_REFUSALS = _Refusals()


def shorten_refusals() -> None:
    """Shortens refusals in the log of this process to a line each. A second call changes nothing."""
    logger.addFilter(_REFUSALS)
