"""Tracing of every process, by the standard OTEL_* variables. Off unless OTEL_TRACES_EXPORTER is set.

The start of the deployment reads the variables, and passes them to each process that it starts. A variable
that a process already has, for example from its pod, is kept.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from outrider.telemetry.trace_exporter import FileExporter

EXPORTER, EXPORTERS = "OTEL_TRACES_EXPORTER", ("otlp", "file", "console", "none")
PROTOCOL, PROTOCOL_OF_TRACES = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOLS = ("grpc", "http/protobuf")
SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
SAMPLERS = (
    "always_on", "always_off", "traceidratio",
    "parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio",
)  # fmt: skip
NAME, DEFAULT_NAME = "OTEL_SERVICE_NAME", "outrider"
FILE, DEFAULT_FILE = "OUTRIDER_TRACES_FILE", "outrider-traces.jsonl"


def tracing_environment() -> dict[str, str]:
    """Returns the environment variables of tracing; empty if tracing is off.

    Raises:
        ValueError: a variable has a value that is not accepted.
    """
    if not _exporters():
        return {}
    _check(SAMPLER, os.environ.get(SAMPLER, SAMPLERS[0]).lower(), SAMPLERS)
    _check_ratio(os.environ.get(RATIO, "1"))
    _check(PROTOCOL, _protocol(), PROTOCOLS)
    given = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    # an absolute path, because other processes run in other folders
    return {**given, FILE: str(Path(os.environ.get(FILE, DEFAULT_FILE)).resolve())}


def start_tracing(environment: Mapping[str, str], role: str) -> Callable[[], None]:
    """Starts tracing, once in each process, before any span. Returns a function that sends the last spans.

    Args:
        environment: result of ``tracing_environment``.
        role: "gateway", "target" or "draft".
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    names = _exporters() if environment else []
    if not names:
        return lambda: None
    service = f"{os.environ.get(NAME, DEFAULT_NAME)}-{role}"
    instance = f"{os.uname().nodename}:{os.getpid()}"
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: service, SERVICE_INSTANCE_ID: instance}),
        shutdown_on_exit=False,
    )
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name)))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def _exporters() -> list[str]:
    names = [name.strip() for name in os.environ.get(EXPORTER, "none").split(",")]
    for name in names:
        _check(EXPORTER, name, EXPORTERS)
    return [name for name in names if name != "none"]


def _exporter(name: str) -> SpanExporter:
    if name == "file":
        return FileExporter(Path(os.environ[FILE]))
    if name == "console":
        return ConsoleSpanExporter()
    # Each exporter takes long to import and reads its own variables: address, certificates, headers.
    if _protocol() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()


def _protocol() -> str:
    return os.environ.get(PROTOCOL_OF_TRACES) or os.environ.get(PROTOCOL) or PROTOCOLS[0]


def _check(variable: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{variable}={value!r}: {', '.join(accepted)} are accepted")


def _check_ratio(value: str) -> None:
    try:
        accepted = 0.0 <= float(value) <= 1.0
    except ValueError:
        accepted = False
    if not accepted:
        raise ValueError(f"{RATIO}={value!r}: a share from 0 to 1 is accepted")
