"""What the time between two Verdicts is made of, told by the events of an answer."""

from types import SimpleNamespace

import pytest

from bench import answers
from bench.answers import PARTS, AnswerRun, RoundParts, mean_round
from gateway.events import DraftAwaited, Drafted, Event, RoundBegan, TokenDecoded, VerdictReceived
from gateway.loop.stats import Stats
from gateway.proposal import Proposal
from outrider.decoding.draft import Draft
from protos import rounds_pb2

DRAFT = Proposal(Draft.chain([5, 6]), seconds=0.030, worker_s=0.025, step_s=0.020)


def reply(step_ms: int, total_ms: int) -> rounds_pb2.TargetReply:
    return rounds_pb2.TargetReply(
        timings=rounds_pb2.Timings(step_ns=step_ms * 10**6, total_ns=total_ms * 10**6)
    )


def verdict(step_ms: int, total_ms: int, continued: bool = False) -> VerdictReceived:
    return VerdictReceived(DRAFT, reply(step_ms, total_ms), "fixed", continued, 0.0, 0.0)


def rounds_of(monkeypatch: pytest.MonkeyPatch, *events: tuple[int, Event]) -> list[dict[str, float]]:
    """Events with their times, milliseconds; rounds in milliseconds, to a nanosecond."""
    times = RoundParts()
    for at_ms, event in events:
        monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda now=at_ms / 1e3: now))
        times.on(event)
    return [{part: round(1e3 * seconds, 6) for part, seconds in parts.items()} for parts in times.rounds]


FIRST = (1000, verdict(80, 90))  # takes the prompt in


def test_round_that_waits_for_its_draft_is_split_in_parts(monkeypatch) -> None:
    rounds = rounds_of(
        monkeypatch,
        (900, RoundBegan("first")),
        FIRST,
        (1001, RoundBegan("fixed", waits=True)),
        (1033, Drafted(DRAFT)),  # asked for at 1003
        (1034, DraftAwaited(0.033)),
        (1090, verdict(50, 53)),
    )
    # gateway: 3 before it asked, 1 before it sent; wire: 5 and 3; wait: 5 and 3
    assert rounds == [{"gateway": 4, "wire": 8, "draft": 20, "wait": 8, "target": 50}]
    assert sum(rounds[0].values()) == 90


def test_round_begun_by_the_target_has_no_part_of_a_draft(monkeypatch) -> None:
    rounds = rounds_of(
        monkeypatch,
        FIRST,
        (1001, RoundBegan("fixed", continued=True)),
        (1031, Drafted(DRAFT)),  # the next round
        (1032, DraftAwaited(0.0)),
        (1060, verdict(50, 55, continued=True)),
        (1061, RoundBegan("fixed", continued=True)),
        (1090, verdict(50, 70, continued=True)),  # 30 since the Verdict before: it had begun earlier
    )
    assert rounds == [
        {"gateway": 0, "wire": 5, "draft": 0, "wait": 5, "target": 50},
        {"gateway": 0, "wire": 0, "draft": 0, "wait": 0, "target": 30},
    ]


def test_draft_of_an_earlier_round_is_not_counted_again(monkeypatch) -> None:
    rounds = rounds_of(
        monkeypatch,
        (980, Drafted(DRAFT)),
        FIRST,
        (1002, RoundBegan("fixed")),
        (1062, verdict(50, 53)),
    )
    assert rounds == [{"gateway": 2, "wire": 7, "draft": 0, "wait": 3, "target": 50}]


def test_plain_decoding_is_the_target_by_itself(monkeypatch) -> None:
    token = TokenDecoded(reply(40, 41), 0.0)
    assert rounds_of(monkeypatch, (1000, token), (1043, token)) == [
        {"gateway": 0, "wire": 2, "draft": 0, "wait": 1, "target": 40}
    ]


def test_mean_round_is_over_the_rounds_of_all_runs() -> None:
    def run(*targets: float) -> AnswerRun:
        rounds = [{**dict.fromkeys(PARTS, 0.0), "target": target} for target in targets]
        return AnswerRun(3.0, 2.0, (1, 2, 3, 4, 5), Stats(), rounds)

    assert mean_round([run(1.0, 2.0), run(6.0)])["target"] == pytest.approx(3.0)
    assert run(1.0).rate == 2.0  # the first token came before
