"""The W3C trace context as messages carry it: one line of text, empty where nothing is recorded."""

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_KEY = "traceparent"


def traceparent_of(span: Span) -> str:
    """What makes the receiver's spans children of this one; empty where it is not recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_KEY, "")


def context_of(traceparent: str) -> Context:
    """The parent's, for new spans; one without a parent where the text is no trace context."""
    return _W3C.extract({_KEY: traceparent}, Context())
