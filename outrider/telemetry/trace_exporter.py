"""Writes traces to a file: a line of OTLP as JSON for every batch of spans."""

import json
import os
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

IDS = ("traceId", "spanId", "parentSpanId")  # hexadecimal in OTLP's JSON, base64 in protobuf's


class FileExporter(SpanExporter):
    """Appends spans to a file, which the processes of a machine may share."""

    def __init__(self, path: Path) -> None:
        """Opens the file. Raises OSError if it cannot be written."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes a batch in one call, so that lines of several processes do not mix."""
        message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        scopes = (scope for resource in message["resourceSpans"] for scope in resource["scopeSpans"])
        for span in (span for scope in scopes for span in scope["spans"]):
            span.update({name: b64decode(span[name]).hex() for name in IDS if name in span})
        os.write(self._file, json.dumps(message, separators=(",", ":")).encode() + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)
