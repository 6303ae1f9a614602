"""Traces of whole answers: spans of the gateway, and below them the spans of both workers."""

import itertools
from functools import partial

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import get_tracer

from gateway.loop.draft_source import DraftSource
from protos.trace_context import context_of
from tests.fakes.spans import TRACEPARENT, Spans
from tests.support.pair import answer, expected, pair
from tests.support.patience import eventually

OF_TARGET = {"verify", "plain decoding"}
DELAY_S = 0.01  # seconds of the way to a worker: tokens of plain decoding are under way when a Draft is sent


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth decision is for plain decoding."""
    decisions, depth = itertools.count(), DraftSource.depth

    def deciding(source: DraftSource) -> tuple[int, str]:
        return depth(source) if next(decisions) % 4 else (0, "restless")

    monkeypatch.setattr(DraftSource, "depth", deciding)


def tokens_of(span: ReadableSpan) -> int:
    tokens = (span.attributes or {}).get("outrider.tokens", 0)
    assert isinstance(tokens, int)
    return tokens


def done_for(spans: Spans, span: ReadableSpan) -> set[str]:
    """Returns the names of the target's spans below a span of the gateway."""
    return OF_TARGET & {child.name for child in spans.below(span)}


def lies_within(span: ReadableSpan, parent: ReadableSpan) -> bool:
    times = [parent.start_time, span.start_time, span.end_time, parent.end_time]
    return times == sorted(times, key=lambda time: time or 0)


async def test_trace_of_an_answer_that_changes_phases_is_complete(spans: Spans, restless: None) -> None:
    """Each span with tokens has what the target did for them, within its own time."""
    phases = set[str]()
    async with pair(4, DELAY_S) as fleet:
        for kind in ("json", "code", "stories") * 2:
            spans.clear()
            generation = get_tracer("test").start_span("a generation", context_of(TRACEPARENT))
            text, _ = await answer(fleet, kind, 0.7, generation=generation)
            assert text == expected(kind, 0.7)
            with_tokens = [span for span in spans if tokens_of(span)]
            assert sum(map(tokens_of, with_tokens)) == len(text)
            phases |= {span.name for span in with_tokens}
            for span in with_tokens:
                await eventually(partial(done_for, spans, span))
                assert all(lies_within(child, span) for child in spans.below(span))
    assert phases == {"round", "plain"}
