"""Shortens the log of a refused call to a line: the caller knows the reason, and there is no defect."""

import logging

from gateway.errors import GatewayError

logger = logging.getLogger("ray.serve")  # Serve logs each exception of a gRPC method with this logger


class _Refusals(logging.Filter):
    """Removes traceback and text of refusals from the log: they could contain parts of a prompt."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        error = getattr(error, "original_exception", error)  # Serve wraps exceptions with a status code
        if isinstance(error, GatewayError):
            line = f"{record.getMessage()} {type(error).__name__}"
            vars(record).update(msg=line, args=(), exc_info=None, exc_text=None)
        return True


_REFUSALS = _Refusals()


def shorten_refusals() -> None:
    """Shortens refusals in the log of this process to a line each. Idempotent."""
    logger.addFilter(_REFUSALS)
