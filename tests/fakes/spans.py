"""An exporter in memory. Only requests that come with a sampled trace context are recorded."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

TRACE_ID, CLIENT_SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{CLIENT_SPAN_ID:016x}-01"
NOT_SAMPLED = f"00-{TRACE_ID:032x}-{CLIENT_SPAN_ID:016x}-00"


@lru_cache
def _exporter() -> InMemorySpanExporter:
    """A process can be given only one provider."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class Spans:
    """Spans that have ended."""

    def __init__(self) -> None:
        self._exporter = _exporter()

    def __iter__(self) -> Iterator[ReadableSpan]:
        return iter(sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self if span.parent and span.parent.span_id == parent.context.span_id]

    def total(self, attribute: str) -> float:
        told: list[Any] = [(span.attributes or {}).get(f"outrider.{attribute}", 0) for span in self]
        return sum(told)

    def clear(self) -> None:
        self._exporter.clear()
