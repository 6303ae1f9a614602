"""Counters of speculation, each declared once: usage, GetLoads, metrics and spans come from this table."""

from dataclasses import dataclass
from typing import Any

BY_NAME = dict[str, dict[str, int]]


@dataclass(frozen=True)
class SpeculationCounter:
    """Counter with this name in usage and messages; in spans the name has the prefix ``outrider.``."""

    name: str
    meaning: str
    metric: str = ""  # metric by task and drafter, with vLLM's labels too if the name is vLLM's; empty: none
    unit: str = "tokens"  # unit of the metric
    is_in_spans: bool = False  # whether spans of rounds and of plain decoding have it
    type: Any = int  # type of the value in JSON


IN_EVERY_ANSWER = (
    SpeculationCounter(
        "target_passes",
        "forward passes of the target that answered a sequence, with a Draft or without",
        metric="outrider_target_passes",
        unit="passes",
        is_in_spans=True,
    ),
    SpeculationCounter(
        "rounds", "Drafts that the target verified", metric="vllm_spec_decode_num_drafts", unit="rounds"
    ),
    SpeculationCounter(
        "drafted",
        "tokens of the Drafts that the target verified",
        metric="vllm_spec_decode_num_draft_tokens",
        is_in_spans=True,
    ),
    SpeculationCounter(
        "accepted",
        "accepted drafted tokens",
        metric="vllm_spec_decode_num_accepted_tokens",
        is_in_spans=True,
    ),
)

IN_REPORTS = (
    SpeculationCounter(
        "reached",
        "drafted tokens whose position was reached; the acceptance rate is accepted / reached",
        metric="outrider_reached_tokens",
        is_in_spans=True,
    ),
    SpeculationCounter(
        "forced",
        "committed tokens that a grammar forced: neither drafted nor the target's choice",
        metric="outrider_forced_tokens",
        is_in_spans=True,
    ),
    SpeculationCounter("mean_accepted_length", "accepted tokens per round", type=float),
    SpeculationCounter("accepted_lengths", "rounds that accepted 0, 1, 2, ... tokens", type=list[int]),
    SpeculationCounter(
        "drafted_by", "rounds, and tokens drafted, reached and accepted, by drafter", type=BY_NAME
    ),
    SpeculationCounter("routed", "times that a drafter was taken, by drafter and reason", type=BY_NAME),
    SpeculationCounter(
        "judged", "tokens asked for and correct tokens, by drafter that did not draft", type=BY_NAME
    ),
    SpeculationCounter("fallbacks", "changes to plain decoding: the sum of the next three"),
    SpeculationCounter("late_drafts", "times that a Draft missed its deadline", is_in_spans=True),
    SpeculationCounter("lost_drafts", "times that the draft worker was lost", is_in_spans=True),
    SpeculationCounter(
        "empty_drafts", "times that the draft worker sent many empty Drafts in a row", is_in_spans=True
    ),
    SpeculationCounter(
        "lost_targets",
        "sequences opened again after their target was lost",
        metric="outrider_reopenings",
        unit="reopenings",
    ),
    SpeculationCounter(
        "hedges",
        "sequences opened at a second target since the first was late",
        metric="outrider_hedges",
        unit="hedges",
    ),
    SpeculationCounter(
        "moves", "sequences that went on at a second target", metric="outrider_moves", unit="moves"
    ),
    SpeculationCounter(
        "prepared_for",
        "verdicts for which the draft worker had prepared",
        metric="outrider_prepared_verdicts",
        unit="verdicts",
        is_in_spans=True,
    ),
    SpeculationCounter(
        "host_drafts",
        "rounds whose Draft the host of the target's GPU chose position by position: a tree, or settings that"
        " read the text",
        is_in_spans=True,
    ),
    SpeculationCounter("ahead_hit_ranks", "foreseen verdicts by rank of the last token", type=list[int]),
    SpeculationCounter(
        "continued",
        "rounds whose Draft the target held before it had finished the round before",
        metric="outrider_continued_rounds",
        unit="rounds",
        is_in_spans=True,
    ),
    SpeculationCounter(
        "saved_ms",
        "milliseconds of draft steps that were over when the gateway asked for the Draft",
        is_in_spans=True,
        type=float,
    ),
    SpeculationCounter(
        "wasted",
        "tokens that the draft worker prepared for verdicts that did not come",
        metric="outrider_wasted_tokens",
        is_in_spans=True,
    ),
)

COUNTERS = (
    *IN_EVERY_ANSWER,
    *IN_REPORTS,
    SpeculationCounter("tokens", "committed tokens", metric="outrider_tokens"),
    SpeculationCounter(
        "draft_s",
        "time that rounds waited for their Drafts, the wire included",
        metric="outrider_draft_seconds",
        unit="seconds",
    ),
    SpeculationCounter(
        "target_s",
        "time that sequences waited for the target, the wire included",
        metric="outrider_target_seconds",
        unit="seconds",
    ),
    SpeculationCounter(
        "second_s",
        "time for which two targets had a sequence",
        metric="outrider_second_target_seconds",
        unit="seconds",
    ),
    SpeculationCounter(
        "saved_s",
        "time of draft steps that were over when the gateway asked for the Draft",
        metric="outrider_draft_saved_seconds",
        unit="seconds",
    ),
)
