"""What the OTEL_* variables may say, and what comes of it."""

import json
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.tracing import start_tracing, tracing_environment
from outrider.telemetry.trace_file import read_spans
from tests.support.patience import LIMIT_S, START_S


@pytest.fixture
def set_(monkeypatch: pytest.MonkeyPatch):
    def set_all(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_tracing_without_an_exporter_is_off(set_):
    set_(OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4317")
    assert tracing_environment() == {}
    set_(OTEL_TRACES_EXPORTER="none")
    assert tracing_environment() == {}


def test_tracing_environment_has_every_variable_of_opentelemetry(set_, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"OTEL_TRACES_EXPORTER": "otlp,file", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    set_(**given)
    environment = tracing_environment()
    assert environment.items() >= given.items()
    assert environment["OUTRIDER_TRACES_FILE"] == str(tmp_path / "outrider-traces.jsonl")


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("OTEL_TRACES_EXPORTER", "jaeger", "otlp, file, console, none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc, http/protobuf"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "10%", "from 0 to 1"),
    ],
)
def test_tracing_environment_refuses_wrong_values_by_name(set_, variable, value, accepted):
    set_(**{"OTEL_TRACES_EXPORTER": "otlp", variable: value})
    with pytest.raises(ValueError, match=accepted) as refused:
        tracing_environment()
    assert str(refused.value).startswith(f"{variable}={value!r}")


def in_a_process(environment: dict[str, str], role: str = "target") -> str:
    """A process that is given the environment, records a span with a span below it, and ends."""
    code = f"""
from opentelemetry import trace
from cluster.tracing import start_tracing
end = start_tracing({environment!r}, {role!r})
tracer = trace.get_tracer("test")
with tracer.start_as_current_span("outer", attributes={{"count": 2**40, "outrider.reason": "measured"}}):
    with tracer.start_as_current_span("inner") as span:
        span.add_event("fallback", {{"outrider.reason": "late"}})
end()
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_S
    )
    return run.stdout


def test_file_holds_the_spans_of_all_processes(tmp_path):
    path = tmp_path / "traces.jsonl"
    environment = {
        "OTEL_TRACES_EXPORTER": "file",
        "OUTRIDER_TRACES_FILE": str(path),
        "OTEL_SERVICE_NAME": "mine",
    }
    for role in ("target", "draft"):
        in_a_process(environment, role)
    inner, outer, _, other = read_spans(path)
    assert (outer.service, other.service) == ("mine-target", "mine-draft")
    assert (inner.trace_id, inner.parent) == (outer.trace_id, outer.id)
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert outer.attributes == {"count": 2**40, "outrider.reason": "measured"}
    assert [(event.name, event.reason) for event in inner.events] == [("fallback", "late")]
    ids = json.loads(path.read_text().splitlines()[0])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert (len(ids["traceId"]), len(ids["spanId"])) == (32, 16)  # hexadecimal
    assert path.stat().st_mode & 0o077 == 0  # there may be prompts in it


class Collector(BaseHTTPRequestHandler):
    """OTLP over HTTP: says ``sent`` what it got."""

    sent: ClassVar[SimpleQueue[tuple[str, bytes]]] = SimpleQueue()

    def do_POST(self) -> None:
        self.sent.put((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def test_tracing_over_http_reaches_the_collector():
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        in_a_process(
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            }
        )
        server.shutdown()
    path, body = Collector.sent.get(timeout=LIMIT_S)
    assert path == "/v1/traces"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for span in resource_spans.scope_spans[0].spans] == ["inner", "outer"]


def test_console_shows_them_too():
    shown = in_a_process({"OTEL_TRACES_EXPORTER": "console"}, "gateway")
    assert '"service.name": "outrider-gateway"' in shown


def test_sampling_ratio_of_zero_records_nothing(tmp_path):
    path = tmp_path / "traces.jsonl"
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    in_a_process({"OTEL_TRACES_EXPORTER": "file", "OUTRIDER_TRACES_FILE": str(path), **sampler})
    assert list(read_spans(path)) == []


def test_tracing_keeps_variables_that_a_process_has(set_, tmp_path):
    own = tmp_path / "own.jsonl"
    set_(OUTRIDER_TRACES_FILE=str(own))
    in_a_process({"OTEL_TRACES_EXPORTER": "file", "OUTRIDER_TRACES_FILE": str(tmp_path / "other.jsonl")})
    assert [span.name for span in read_spans(own)] == ["inner", "outer"]


def test_switched_off_it_can_be_handed_to_a_process_all_the_same():
    partial(start_tracing, {}, "draft")()()
