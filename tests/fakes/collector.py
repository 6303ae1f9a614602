"""An OTLP collector over gRPC that keeps what it is sent."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """One that has ended; times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    id: str
    parent: str  # "" for none
    start: int
    end: int
    attributes: dict[str, Any]
    events: dict[str, str]  # reason by name


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    address: str = ""
    spans: list[Span] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self.changed:
            self.spans += _spans(request)
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, is_complete: Callable[[list[Span]], bool], seconds: float) -> list[Span]:
        """The spans of a trace, oldest first, once they are complete, or what there is after so long."""

        def those() -> list[Span]:
            return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda span: span.start)

        with self.changed:
            self.changed.wait_for(lambda: is_complete(those()), seconds)
            return those()


def _spans(request: Any) -> Iterator[Span]:
    for resource_spans in request.resource_spans:
        service = _values(resource_spans.resource.attributes)["service.name"]
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield Span(
                    service,
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    {
                        event.name: _values(event.attributes).get("outrider.reason", "")
                        for event in span.events
                    },
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"http://127.0.0.1:{port}"
    server.start()
    yield collector
    server.stop(None).wait()
