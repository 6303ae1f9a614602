"""Trace context of the span that a Draft is made for: spans of workers become its children."""

from contextvars import ContextVar

TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")  # W3C; empty: nothing is recorded
