"""Who waits for the work of an asyncio task: workers make their spans below it."""

from contextvars import ContextVar

_TRACEPARENT = ContextVar("traceparent", default="")


def waits_for_this_task(traceparent: str) -> None:
    """Says so in the task that runs, and those that it begins. Empty where nothing is recorded."""
    _TRACEPARENT.set(traceparent)


def traceparent_of_waiting() -> str:
    """W3C trace context."""
    return _TRACEPARENT.get()
