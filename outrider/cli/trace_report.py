"""Report of how the time of traced requests was spent, and which setting would help."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.telemetry.trace_file import FileSpan

GENERATIONS = ("chat ", "text_completion ")
WORKER_SPANS = ("verify", "plain decoding")  # spans of the target
IN_TARGET = ("queue", "forward", "sample")
PARTS = ("draft", "wire", "wait", "target", "gateway")
MEANING = {
    "queue": "in the gateway's queue",
    "draft": "steps of the draft that a round waited for",
    "wire": "messages between gateway and workers",
    "wait": "for a step of draft or target to begin, or for a Draft that never came",
    "target": "steps of the target",
    "gateway": "everything else in the gateway",
}
MUCH = 0.2  # share of the time from which advice is given
FEW = 0.02  # share of rounds with a late Draft, above which advice is given
POOR, GOOD = 0.4, 0.9  # accepted / reached
LARGE_BATCH = 8  # sequences in a step


@dataclass
class TraceReport:
    """Report of one generation or several; times in milliseconds."""

    generations: int = 0
    lasted: float = 0.0
    first_token: float = 0.0
    tokens: int = 0
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEANING, 0.0))
    in_target: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IN_TARGET, 0.0))
    counts: Counter[str] = field(default_factory=Counter)  # rounds, drafted, accepted, ...
    plain_reasons: Counter[str] = field(default_factory=Counter)  # tokens of plain decoding, by reason
    events: Counter[str] = field(default_factory=Counter)  # events by their text
    modes: set[str] = field(default_factory=set)
    batch: float = 0.0  # sequences in the target's steps, summed over rounds

    def share(self, part: str) -> float:
        """Returns a share of all times."""
        return self.times[part] / (sum(self.times.values()) or 1.0)


def report(spans: Sequence[FileSpan]) -> TraceReport:
    """Reports all generations among the spans."""
    result = TraceReport()
    below: dict[str, list[FileSpan]] = {}
    for span in spans:
        below.setdefault(span.parent, []).append(span)
    for span in spans:
        if span.name.startswith(GENERATIONS):
            _add_generation(result, span, below)
    return result


def _add_generation(result: TraceReport, generation: FileSpan, below: dict[str, list[FileSpan]]) -> None:
    attributes = generation.attributes
    result.generations += 1
    result.lasted += generation.milliseconds
    result.first_token += 1e3 * attributes.get("gen_ai.response.time_to_first_chunk", 0.0)
    result.tokens += attributes.get("gen_ai.usage.output_tokens", 0)
    result.modes.add(attributes.get("outrider.mode", ""))
    result.times["queue"] += attributes.get("outrider.queue_ms", 0.0)
    result.events.update(f"{event.name}: {event.reason}" for event in generation.events)
    accounted = attributes.get("outrider.queue_ms", 0.0)
    for span in below.get(generation.id, ()):
        if "outrider.tokens" in span.attributes:
            accounted += _add_round(result, span)
        for worker in below.get(span.id, ()):
            result.events.update(
                f"{event.name} in the {worker.name}: {event.reason}" for event in worker.events
            )
            if worker.name in WORKER_SPANS:
                for part in below.get(worker.id, ()):
                    result.in_target[part.name] += part.milliseconds
    # Concurrent answers add up to more than the request's time.
    result.times["gateway"] += max(generation.milliseconds - accounted, 0.0)


def _add_round(result: TraceReport, span: FileSpan) -> float:
    """Adds a round and returns its milliseconds."""
    attributes = span.attributes
    parts = {part: float(attributes.get(f"outrider.{part}_ms", 0.0)) for part in PARTS}
    for part, milliseconds in parts.items():
        result.times[part] += milliseconds
    result.counts[span.name] += 1
    for name in ("drafted", "reached", "accepted", "prepared_for", "continued", "late_drafts"):
        result.counts[name] += attributes.get(f"outrider.{name}", 0)
    result.batch += attributes.get("outrider.batch_size", 0)
    if span.name == "plain":
        result.plain_reasons[attributes["outrider.reason"]] += attributes["outrider.tokens"]
    return sum(parts.values())


def lines(result: TraceReport) -> Iterator[str]:
    """Returns the lines of the report."""
    of = "" if result.generations == 1 else f"{result.generations} requests, together "
    yield (
        f"{of}{result.tokens} tokens in {result.lasted:.0f} ms, "
        f"the first after {result.first_token / result.generations:.0f} ms"
    )
    counts = result.counts
    if counts["round"]:
        yield (
            f"{counts['round']} rounds: {counts['drafted']} tokens drafted, {counts['reached']} reached, "
            f"{counts['accepted']} accepted; {counts['continued']} rounds that the target began by itself"
        )
    yield from (
        f"{tokens} tokens decoded plainly: {reason}" for reason, tokens in result.plain_reasons.most_common()
    )
    yield ""
    for part, meaning in MEANING.items():
        yield f"  {part:<8}{result.times[part]:>9.1f} ms  {result.share(part):>4.0%}  {meaning}"
        if part == "target":
            inside = (f"{name} {result.in_target[name]:.1f}" for name in IN_TARGET)
            yield f"  {'':<8}{'':>9}     {'':>4}  as the target has it, ms: {', '.join(inside)}"
    yield ""
    yield from _event_lines(result)
    yield from (f"-> {line}" for line in advice(result))


def figures(result: TraceReport, trace_id: str | None) -> dict[str, Any]:
    """Returns the report as data; times in milliseconds. trace_id: None for several requests."""
    return {"trace": trace_id, **vars(result), "modes": sorted(result.modes), "advice": advice(result)}


def _event_lines(result: TraceReport) -> Iterator[str]:
    """Yields a line for each event of a single request, or for each kind of event of several requests."""
    if result.generations == 1:
        yield from (f"  {event}" for event in result.events.elements())
        return
    kinds = Counter[str]()
    for event, times in result.events.items():
        kinds[":".join(event.split(":")[:2])] += times
    yield from (f"  {times} times {kind}" for kind, times in kinds.most_common())


def advice(result: TraceReport) -> list[str]:
    """Returns advice, the most expensive problem first."""
    found = sorted(_advice(result), reverse=True)
    return [text for _, text in found] or ["nothing stands out: most of the time is the target's own steps"]


def _advice(result: TraceReport) -> Iterable[tuple[float, str]]:
    """Yields advice, with the milliseconds at stake."""
    times, counts, share = result.times, result.counts, result.share
    rounds, reached = counts["round"], counts["reached"]
    rate = counts["accepted"] / reached if reached else 0.0
    if share("queue") > MUCH:
        yield (
            times["queue"],
            "requests wait in the queue: more targets and gateways, higher gateway.max_requests",
        )
    if share("draft") > MUCH:
        is_prepared = counts["prepared_for"] > 0
        ahead = "rounds wait for the draft: set drafts.model.draft_ahead, which prepares Drafts meanwhile"
        slow = "the draft is slow: a smaller draft, its threads or accelerator"
        yield times["draft"], slow if is_prepared else ahead
    if share("wire") > MUCH:
        yield times["wire"], "the wire is slow: place workers nearer by the resources of target and draft"
    if share("wait") > MUCH:
        yield times["wait"], _waiting(result)
    if share("gateway") > MUCH:
        yield times["gateway"], "the gateway is busy: more gateways"
    if counts["late_drafts"] > FEW * rounds:
        late = "Drafts came late: higher gateway.propose_deadline_ms, more drafts, or a faster one"
        yield times["wait"], late
    if any(event.startswith("preemption") for event in result.events):
        yield times["wait"], "the cache was full: a higher target.cache_memory, or fewer gateway.max_requests"
    accepted = f"{rate:.0%} of reached tokens accepted"
    if rounds and rate < POOR and "fixed" in result.modes:
        yield times["target"], f"{accepted}: mode auto drafts as deep as pays"
    if result.plain_reasons["off"] > result.tokens / 2:
        yield times["target"], "speculation is off: ask with mode auto"
    if rounds and rate > GOOD and result.plain_reasons.total() < result.tokens / 2:
        yield 0.0, f"{accepted}: deeper Drafts, by pace.max_depth"


def _waiting(result: TraceReport) -> str:
    rounds = sum(result.counts[name] for name in ("round", "plain"))
    if result.in_target["queue"] < result.times["wait"] / 2:
        return "the draft worker is shared by many: more drafts"
    if rounds and result.batch / rounds >= LARGE_BATCH:
        return "the target is shared by many: more targets"
    return "steps of other sequences delay each round: more targets, or a smaller share of long prompts"
