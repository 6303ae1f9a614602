"""Trace context of the span that a task drafts for: workers make their spans below it."""

from contextvars import ContextVar

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")  # W3C; empty: nothing is recorded
