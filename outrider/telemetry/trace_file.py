"""Reads trace files that ``trace_exporter`` has written. Does not need opentelemetry."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FileEvent:
    name: str
    reason: str


@dataclass(frozen=True)
class FileSpan:
    """Span of a file; times are in nanoseconds."""

    service: str
    name: str
    trace_id: str
    id: str
    parent: str  # empty: no parent
    start: int
    end: int
    attributes: dict[str, Any]
    events: tuple[FileEvent, ...]

    @property
    def milliseconds(self) -> float:
        return (self.end - self.start) / 1e6


def read_spans(path: Path) -> Iterator[FileSpan]:
    """Returns the spans in the order in which they were written.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not OTLP as JSON; the message names the line.
    """
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            yield from _read(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no trace: OTLP in JSON is accepted") from error


def _read(message: dict[str, Any]) -> Iterator[FileSpan]:
    for resource in message["resourceSpans"]:
        service = _values(resource["resource"]["attributes"])["service.name"]
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield FileSpan(
                    service,
                    span["name"],
                    span["traceId"],
                    span["spanId"],
                    span.get("parentSpanId", ""),
                    int(span["startTimeUnixNano"]),
                    int(span["endTimeUnixNano"]),
                    _values(span.get("attributes", [])),
                    tuple(_event(event) for event in span.get("events", [])),
                )


def _event(event: dict[str, Any]) -> FileEvent:
    return FileEvent(event["name"], _values(event.get("attributes", [])).get("outrider.reason", ""))


def _values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns attributes by key. OTLP's JSON holds integers as strings, since they may have 64 bits."""
    values = {}
    for item in attributes:
        ((kind, value),) = item["value"].items()
        values[item["key"]] = int(value) if kind == "intValue" else value
    return values
