"""What the load benchmark computes, without a service."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import load, report
from bench.load import keep, rotated
from bench.load_rows import against_best, interval, summary
from bench.streams import (
    CREATIVE,
    Arrival,
    Slice,
    StreamAnswer,
    arrival_of,
    first_tokens,
    percentile,
    rate_between,
    request_of,
    slice_of,
    speculation_of,
)
from outrider.demo.prompts import KINDS
from protos import generation_pb2

TASKS = [*KINDS, CREATIVE]


def answered(sent: float, *arrivals: tuple[float, int], **stats: Any) -> StreamAnswer:
    """A finished one if anything is said of its record; a chunk of several tokens is a round."""
    speculation = generation_pb2.SpeculationCounts(**stats) if stats else None
    return StreamAnswer(sent, [Arrival(time, n, int(n > 1), 1) for time, n in arrivals], speculation)


def a_slice(rate: float = 1.0, first: list[float] | None = None, per: list[float] | None = None) -> Slice:
    stats = generation_pb2.SpeculationCounts(rounds=2, drafted=5)
    return Slice(rate, first or [], per or [], rounds=4, passes=5, finished=[stats])


def test_chunk_counts_by_the_share_of_its_time_that_is_inside() -> None:
    answers = [answered(0.0, (1.0, 1), (3.0, 4), (5.0, 4))]
    assert rate_between(answers, 2.0, 4.0) == pytest.approx((2 + 2) / 2)
    assert rate_between(answers, 0.0, 5.0) == pytest.approx(9 / 5)
    assert rate_between(answers, 6.0, 8.0) == 0.0


def test_windows_side_by_side_count_every_token_once() -> None:
    answers = [answered(0.2 * n, (0.3 * n + 0.5, 1), (0.4 * n + 1.0, 3)) for n in range(7)]
    parts = [rate_between(answers, start, start + 1) for start in range(5)]
    assert sum(parts) == pytest.approx(7 * 4)


def test_slice_counts_requests_by_what_they_did_in_it() -> None:
    before = answered(0.0, (0.5, 1), (0.9, 4), drafted=9)
    inside = answered(0.5, (1.1, 1), (1.5, 4), drafted=6)
    ends_inside = answered(0.1, (0.4, 1), (1.2, 4), drafted=4)
    continues = answered(1.6, (1.9, 1), (2.5, 4))
    waits = answered(1.0)
    measured = slice_of([before, inside, ends_inside, continues, waits], 1.0, 2.0)
    assert measured.first_token_s == pytest.approx([0.6, 0.3])
    assert measured.per_token_s == pytest.approx([0.1, 0.2])
    assert (measured.rounds, measured.passes) == (2, 4)
    assert [stats.drafted for stats in measured.finished] == [6, 4]


def test_origins_tell_the_passes_of_the_target() -> None:
    accepted, own, plain = (
        generation_pb2.ORIGIN_ACCEPTED,
        generation_pb2.ORIGIN_TARGET,
        generation_pb2.ORIGIN_PLAIN,
    )
    chunk = generation_pb2.GenerateChunk(
        token_ids=range(6), origins=[plain, accepted, accepted, own, own, plain]
    )
    assert arrival_of(chunk, 2.0) == Arrival(2.0, tokens=6, rounds=2, passes=4)


def test_single_token_has_no_time_per_token() -> None:
    measured = slice_of([answered(0.0, (1.0, 1), target_passes=1)], 0.0, 2.0)
    assert measured.first_token_s == [1.0]
    assert measured.per_token_s == []


def test_percentile_of_values_is_a_value_and_of_no_values_is_none() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(range(101)), 99) == 99.0


def test_summary_takes_the_median_rate_and_all_requests_together() -> None:
    slices = [a_slice(10, [0.1], [0.01]), a_slice(30, [0.3, 0.5], [0.03]), a_slice(11)]
    row = summary(slices)
    assert row["tokens/s"] == 11
    assert row["first token p50, ms"] == pytest.approx(300)
    assert row["per token p50, ms"] == pytest.approx(20)
    assert row["mean depth"] == 2.5
    assert row["share of passes with a Draft"] == 0.8
    assert row["finished"] == 3


def test_summary_without_finished_requests_has_gaps() -> None:
    row = summary([Slice(5.0, [], [], 0, 0, [])])
    assert row["tokens/s"] == 5.0
    assert row["first token p99, ms"] is None
    assert row["mean depth"] is None
    assert row["share of passes with a Draft"] is None


def compared(**rates: list[float]) -> list[dict[str, Any]]:
    return against_best({mode: [a_slice(rate) for rate in of_mode] for mode, of_mode in rates.items()})


def test_reference_is_the_best_median_and_ratios_are_paired() -> None:
    (row,) = compared(plain=[100.0, 10.0, 100.0], fixed=[90.0, 90.0, 300.0], adaptive=[95.0, 9.9, 102.0])
    assert row["reference"] == "plain"
    assert row["adaptive / reference"] == pytest.approx(0.99)  # a ratio of medians would be 0.95
    assert row["ok"]


def test_below_the_bar_with_its_whole_interval_is_not_ok() -> None:
    assert not compared(plain=[100.0] * 7, adaptive=[96.0] * 7)[0]["ok"]
    assert compared(plain=[100.0] * 7, adaptive=[97.0] * 7)[0]["ok"]
    (row,) = compared(plain=[100.0] * 7, adaptive=[90.0, 92.0, 94.0, 95.0, 99.0, 100.0, 101.0])
    assert row["adaptive / reference"] < 0.97 <= row["high"]
    assert row["ok"]


@pytest.mark.parametrize("mode", ["plain", "adaptive"])
def test_mode_alone_is_compared_with_nothing(mode: str) -> None:
    assert compared(**{mode: [1.0]}) == []


def test_interval_repeated_is_the_same_and_holds_the_median() -> None:
    values = [0.9, 1.0, 1.1, 1.05, 0.95, 1.02, 0.98]
    low, high = interval(values)
    assert (low, high) == interval(values)
    assert 0.9 <= low < 1.0 < high <= 1.1
    assert interval([1.0] * 7) == (1.0, 1.0)


def test_rotated_modes_are_each_first_in_turn() -> None:
    modes = ["plain", "fixed-2", "adaptive"]
    assert [rotated(modes, by)[0] for by in range(4)] == ["plain", "fixed-2", "adaptive", "plain"]
    assert all(sorted(rotated(modes, by)) == sorted(modes) for by in range(4))


def test_request_differs_between_modes_by_its_mode_alone() -> None:
    for number in range(3 * len(TASKS)):
        requests = [request_of(TASKS, mode, number, 64) for mode in ("plain", "fixed-4", "adaptive")]
        assert [request.speculation.mode for request in requests] == ["off", "fixed", "auto"]
        for request in requests:
            request.ClearField("speculation")
        assert requests[0] == requests[1] == requests[2]


def test_tasks_take_turns_and_so_do_temperatures() -> None:
    requests = [request_of(TASKS, "plain", number, 64) for number in range(2 * len(TASKS))]
    assert [request.task for request in requests] == [*TASKS, *TASKS]
    assert len({request.sampling.seed for request in requests}) == len(requests)
    temperatures = [request.sampling.temperature for request in requests if request.task != "creative"]
    assert temperatures == [0.0] * len(KINDS) + [0.7] * len(KINDS)
    creative = [request for request in requests if request.task == "creative"]
    assert all(request.sampling.temperature == 1.5 for request in creative)
    assert creative[0].text == request_of(TASKS, "plain", TASKS.index("stories"), 64).text


@pytest.mark.parametrize("mode", ["", "fixed", "fixed-", "fixed-four", "off"])
def test_mode_if_unknown_is_refused_by_name(mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode is '{mode}'"):
        speculation_of(mode)


def test_streams_that_begin_together_do_not_end_together() -> None:
    lengths = [first_tokens(stream, 64) for stream in range(64)]
    assert min(lengths) >= 2
    assert max(lengths) <= 64
    assert len({*lengths}) > 48


def test_section_measured_alone_leaves_the_other_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(load, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "load", "closed"])
    of_target = {"target": "60M"}
    keep({"rows": [of_target], "ratios": [of_target]}, "closed", "60M", 2)
    monkeypatch.setattr("sys.argv", ["bench", "load", "creative", "--slices", "3"])
    keep({"creative": [of_target]}, "creative", "60M", 2)
    kept = json.loads((tmp_path / "load.json").read_text())
    assert kept["rows"] == kept["ratios"] == kept["creative"] == [of_target]
    assert kept["commands"] == {
        "closed, 60M": "python -m bench load closed",
        "creative, 60M": "python -m bench load creative --slices 3",
    }


def test_target_measured_anew_replaces_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(load, "RESULTS", tmp_path)
    for target, rate in (("60M", 1), ("190M", 2), ("60M", 3)):
        rows = [{"target": target, "rate": rate}]
        keep({"rows": rows, "ratios": rows}, "closed", target, 2)
    kept = json.loads((tmp_path / "load.json").read_text())
    assert [row["rate"] for row in kept["rows"]] == [2, 3]
