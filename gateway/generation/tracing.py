"""Spans of a request: the server's span and the generation's. answer_trace.py has the spans of rounds.

Only the OpenTelemetry API is used here. Spans are no-ops if tracing is not set up (cluster/tracing.py) or a
request is not sampled, and then no attribute is computed.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.generation.request import AnswerUsage, Chunk, Prepared
from gateway.loop.answer_trace import NO_TRACE, AnswerTrace, NoTrace
from gateway.settings import Speculation
from protos.trace_context import context_of

PROVIDER = "outrider"  # gen_ai.provider.name
TRACER = trace.get_tracer("outrider")
MAX_INTEGER = 2**63
SAMPLING_FIELDS = (
    "temperature", "top_k", "top_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty",
)  # fmt: skip


@contextmanager
def served(name: str, traceparent: str, attributes: Mapping[str, AttributeValue]) -> Iterator[Span]:
    """Makes the server's span of a request, a child of its client's span. It is not the current span."""
    span = TRACER.start_span(name, context_of(traceparent), SpanKind.SERVER, attributes=attributes)
    try:
        yield span
    except Exception as error:
        failed(span, error)
        raise
    finally:
        span.end()


@contextmanager
def untraced() -> Iterator[Span]:
    """Replaces ``served`` if a request generates nothing."""
    yield INVALID_SPAN


def failed(span: Span, error: Exception) -> None:
    """Sets the span's status to the error. Messages of our errors contain no prompts."""
    span.set_status(StatusCode.ERROR, str(error))
    span.set_attribute("error.type", type(error).__name__)


class GenerationTrace:
    """Span of a generation, from its place in the queue to its last token, for all answers together."""

    def __init__(self, prepared: Prepared, model: str) -> None:
        chats = not prepared.continues_text
        operation = "chat" if chats else "text_completion"
        self._span = TRACER.start_span(
            f"{operation} {model}", trace.set_span_in_context(prepared.server_span)
        )
        self._started = time.perf_counter()
        self._had_token = self._is_finished = False
        if self._span.is_recording():
            self._span.set_attributes(_asked(prepared, operation, model))

    def __enter__(self) -> "GenerationTrace":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            failed(self._span, error)
        elif error is not None and not self._is_finished:
            self._span.add_event("cancelled", {"outrider.reason": "the client has gone"})
        self._span.end()

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def answer(self, choice: int, speculation: Speculation) -> NoTrace:
        """Returns the listener that makes the spans of an answer."""
        return AnswerTrace(self._span, choice, speculation) if self.is_recording else NO_TRACE

    def admitted(self) -> None:
        """Records that the request has left the queue."""
        if self.is_recording:
            self._span.set_attribute("outrider.queue_ms", 1e3 * (time.perf_counter() - self._started))

    def sending(self, chunk: Chunk) -> None:
        """Records that a chunk is about to be sent."""
        if not self._had_token and chunk.tokens:
            self._had_token = True
            if self.is_recording:
                passed_s = time.perf_counter() - self._started
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", passed_s)

    def finished(self, usage: AnswerUsage, finish_reasons: list[str]) -> None:
        """Records that all answers are complete: a reader that leaves now has not cancelled them."""
        self._is_finished = True
        if self.is_recording:
            self._span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.response.finish_reasons": finish_reasons,
                    "outrider.rounds": usage.stats.rounds,
                    "outrider.target_passes": usage.stats.target_passes,
                }
            )

    def texts(self, prompts: list[str], answers: list[str]) -> None:
        """Records prompts and answers, for deployments that want them in their traces."""
        self._span.set_attributes(
            {
                "gen_ai.input.messages": json.dumps([_message("user", text) for text in prompts]),
                "gen_ai.output.messages": json.dumps([_message("assistant", text) for text in answers]),
            }
        )


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _asked(prepared: Prepared, operation: str, model: str) -> dict[str, AttributeValue]:
    speculation, sampling = prepared.speculation, prepared.sequences[0].sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": len(prepared.sequences),
        "outrider.mode": speculation.mode,
        "outrider.drafter": speculation.drafter or "",
        "outrider.verification": speculation.verification,
        "outrider.priority": prepared.priority,
    }
    if prepared.task is not None:
        attributes["outrider.task"] = prepared.task
    for field in SAMPLING_FIELDS:
        value = getattr(sampling, field)
        # Integers of attributes are signed and have 64 bits: larger values become text.
        attributes[f"gen_ai.request.{field}"] = str(value) if value >= MAX_INTEGER else value
    return attributes
