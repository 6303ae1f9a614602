"""``outrider trace``: how the time was spent, and what would help."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.command_line import main

MS = 10**6


class Trace:
    """Trace of one request, written by hand: its rounds follow each other."""

    def __init__(self, number: int = 1, mode: str = "auto") -> None:
        self.id = f"{number:032x}"
        self.end, self.ids = number * 10**12, 0
        self.started = self.end
        self.spans: list[dict[str, Any]] = []
        self.mode = mode
        self.generation = self._id()
        self.tokens = 0
        self.events: list[dict[str, Any]] = []

    def _id(self) -> str:
        self.ids += 1
        return f"{self.ids:016x}"

    def _span(self, name: str, parent: str, start: int, end: int, **attributes: Any) -> str:
        id_ = self._id()
        values = {f"outrider.{key}": value for key, value in attributes.items()}
        self.spans.append(span(self.id, id_, name, parent, start, end, values))
        return id_

    def round(
        self, name: str = "round", tokens: int = 4, reason: str = "measured", **parts: float
    ) -> "Trace":
        lasts = sum(parts.get(part, 0.0) for part in ("draft", "wire", "wait", "target", "gateway"))
        start, self.end = self.end, self.end + int(lasts * MS)
        counts = {
            name: parts.pop(name, default)
            for name, default in (
                ("drafted", 4),
                ("reached", 4),
                ("accepted", 3),
                ("prepared_for", 0),
                ("late_drafts", 0),
            )
        }
        counts = counts if name == "round" else {}
        times = {f"{part}_ms": value for part, value in parts.items()}
        own = self._span(
            name, self.generation, start, self.end, tokens=tokens, reason=reason, **counts, **times
        )
        verify = self._span("verify", own, start, self.end)
        self._span("forward", verify, start, start + int(parts.get("target", 0.0) * MS / 2))
        self.tokens += tokens
        return self

    def event(self, name: str, reason: str) -> "Trace":
        self.events.append({"name": name, "attributes": attributes_of({"outrider.reason": reason})})
        return self

    def line(self) -> str:
        said = {
            "gen_ai.usage.output_tokens": self.tokens,
            "gen_ai.response.time_to_first_chunk": 0.005,
            "outrider.queue_ms": 0.0,
            "outrider.mode": self.mode,
        }
        generation = span(self.id, self.generation, "text_completion m", "", self.started, self.end, said)
        generation["events"] = self.events
        resource = {"attributes": attributes_of({"service.name": "outrider-gateway"})}
        scopes = [{"spans": [*self.spans, generation]}]
        return json.dumps({"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]})


def span(
    trace_id: str, id_: str, name: str, parent: str, start: int, end: int, values: dict[str, Any]
) -> Any:
    return {
        "traceId": trace_id, "spanId": id_, "name": name, "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(end), "attributes": attributes_of(values),
        **({"parentSpanId": parent} if parent else {}),
    }  # fmt: skip


def attributes_of(values: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {str: "stringValue", float: "doubleValue", int: "intValue"}
    return [
        {"key": key, "value": {kinds[type(value)]: str(value) if type(value) is int else value}}
        for key, value in values.items()
    ]


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def run(*traces: Trace, arguments: tuple[str, ...] = ()) -> str:
        path = tmp_path / "traces.jsonl"
        path.write_text("\n".join(trace.line() for trace in traces) + "\n")
        assert main(["trace", str(path), *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_parts_of_a_request_and_what_they_mean(printed):
    out = printed(Trace().round(draft=2.0, wire=1.0, wait=1.0, target=6.0).round(target=9.0, gateway=1.0))
    assert "8 tokens in 20 ms, the first after 5 ms" in out
    assert "2 rounds: 8 tokens drafted, 8 reached, 6 accepted" in out
    shares = dict(line.split()[0:4:3] for line in out.splitlines() if " ms  " in line)
    assert shares == {
        "queue": "0%",
        "draft": "10%",
        "wire": "5%",
        "wait": "5%",
        "target": "75%",
        "gateway": "5%",
    }
    assert "queue 0.0, forward 7.5, sample 0.0" in out
    assert "nothing stands out" in out


@pytest.mark.parametrize(
    ("parts", "setting"),
    [
        ({"draft": 5.0, "target": 5.0}, "drafts.model.draft_ahead"),
        ({"draft": 5.0, "target": 5.0, "prepared_for": 1}, "threads or accelerator"),
        ({"wire": 5.0, "target": 5.0}, "resources of"),
        ({"wait": 5.0, "target": 5.0}, "drafts"),
        ({"gateway": 5.0, "target": 5.0}, "gateways"),
        ({"target": 5.0, "late_drafts": 1}, "gateway.propose_deadline_ms"),
        ({"target": 5.0, "accepted": 1}, "mode auto"),
        ({"target": 5.0, "accepted": 4}, "max_depth"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_advice_answers_a_large_cost_with_a_setting(printed, parts, setting):
    (advice,) = [line for line in printed(Trace(mode="fixed").round(**parts)).splitlines() if "->" in line]
    assert setting in advice


def test_advice_ignores_a_few_late_drafts_among_many(printed):
    trace = Trace().round(target=5.0, late_drafts=1)
    for _ in range(60):
        trace.round(target=5.0)
    assert "nothing stands out" in printed(trace)


def test_report_has_plain_decoding_and_events_with_their_reasons(printed):
    trace = Trace(mode="off").round("plain", tokens=60, reason="off", target=50.0)
    out = printed(trace.event("fallback", "late Draft: no Draft after 0.020 s"))
    assert "60 tokens decoded plainly: off" in out
    assert "fallback: late Draft: no Draft after 0.020 s" in out
    assert "-> speculation is off" in out


def test_command_shows_the_newest_trace_a_named_trace_or_all(printed):
    traces = [Trace(0xA1).round(target=5.0), Trace(0xB2).round(target=5.0).round(target=5.0)]
    assert f"trace {traces[1].id}" in printed(*traces)
    assert f"trace {traces[0].id}" in printed(*traces, arguments=("--id", traces[0].id[:31] + "1"))
    assert "2 requests, together 12 tokens in 15 ms" in printed(*traces, arguments=("--all",))


def test_report_of_many_requests_counts_events_by_kind(printed):
    traces = [
        Trace(number).round(target=5.0).event("fallback", f"late Draft: no Draft after 0.0{number} s")
        for number in (1, 2, 3)
    ]
    traces[0].event("rounds", "measured")
    out = printed(*traces, arguments=("--all",))
    assert "3 times fallback: late Draft\n" in out
    assert "1 times rounds: measured\n" in out


def test_trace_as_json_has_parts_counts_and_advice(printed):
    trace = Trace(mode="off").round("plain", tokens=60, reason="off", target=50.0)
    told = json.loads(printed(trace, arguments=("--json", "-")))
    assert (told["trace"], told["tokens"], told["times"]["target"]) == (trace.id, 60, 50.0)
    assert told["advice"] == ["speculation is off: ask with mode auto"]


WRONG = [
    ("", "no generation"),
    ("not json\n", "line 1 is no trace"),
    ("{}\n", "line 1 is no trace"),
    (None, "No such file"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_trace_of_another_file_is_refused(tmp_path, capsys, content, message):
    path = tmp_path / "traces.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["trace", str(path)]) == 1
    assert message in capsys.readouterr().err
