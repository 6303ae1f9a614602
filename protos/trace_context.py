"""W3C trace context in messages: a line of text, empty if nothing is recorded."""

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_W3C = TraceContextTextMapPropagator()
_KEY = "traceparent"


def traceparent_of(span: Span) -> str:
    """Returns the text that makes the receiver's spans children of this span; empty: nothing is recorded."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_KEY, "")


def context_of(traceparent: str) -> Context:
    """Returns the parent's context for new spans; without a parent if the text is not a trace context."""
    return _W3C.extract({_KEY: traceparent}, Context())
