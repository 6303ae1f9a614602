"""Trace context of the span that waits for an asyncio task: workers make their spans below it."""

from contextvars import ContextVar

_TRACEPARENT = ContextVar("traceparent", default="")


def waits_for_this_task(traceparent: str) -> None:
    """Sets it for the running task and the tasks that it begins; empty: nothing is recorded."""
    _TRACEPARENT.set(traceparent)


def traceparent_of_waiting() -> str:
    """Returns the W3C trace context."""
    return _TRACEPARENT.get()
