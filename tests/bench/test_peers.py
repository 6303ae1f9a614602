"""How peers are asked and timed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from bench import report
from bench.peers import compare
from bench.peers.answering import Answers, PeerTask, answer_task
from bench.peers.compare import PEERS


def task(path: Path) -> PeerTask:
    return PeerTask(
        target="t",
        draft=None,
        depth=4,
        threads=1,
        streams=(1, 3),
        prompts=[[1], [2, 3]],
        tokens=4,
        temperature=0.8,
        seeded=2,
        repetitions=2,
        result=str(path),
    )


def test_answer_task_answers_by_streams_and_then_with_seeds(tmp_path):
    asked = []

    def answer(prompts, seeds):
        asked.append((len(prompts), seeds))
        return Answers(
            [[seeds[number] if seeds else 7] * 4 for number in range(len(prompts))], 2 * len(prompts)
        )

    answer_task(task(tmp_path / "result"), answer)
    result = json.loads((tmp_path / "result").read_text())
    assert asked == [(1, None)] * 3 + [(3, None)] * 3 + [(2, range(2))]
    assert [row["streams"] for row in result["rows"]] == [1, 3]
    assert {row["tokens_per_pass"] for row in result["rows"]} == {2.0}
    assert all(row["rate"] > 0 for row in result["rows"])
    assert result["seeded"] == [[0] * 4, [1] * 4]


def test_passes_that_nobody_tells_stay_untold(tmp_path):
    answer_task(task(tmp_path / "result"), lambda prompts, seeds: Answers([[7]] * len(prompts), None))
    result = json.loads((tmp_path / "result").read_text())
    assert {row["tokens_per_pass"] for row in result["rows"]} == {None}


def test_peers_are_modules():
    for peer in PEERS.values():
        assert importlib.util.find_spec(f"bench.peers.{peer.module}")


def test_compare_with_peers_left_out_keeps_their_last_figures(monkeypatch, tmp_path):
    def run(command: str, rate: float, pair: str, *peers: str, threads: int = 2) -> dict[str, Any]:
        monkeypatch.setattr(compare, "command", lambda: command)
        rows = [{"pair": pair, "peer": peer, "tokens/s": rate + mode} for peer in peers for mode in (0, 1)]
        found: dict[str, Any] = json.loads(compare.saved(rows, threads).read_text())
        return found

    for module in (compare, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    run("all", 10, "demo", "one", "another")
    run("large", 20, "190M", "one")
    last = run("again", 30, "demo", "one")
    assert [row["tokens/s"] for row in last["rows"]] == [30, 31, 10, 11, 20, 21]
    assert last["commands"] == {"demo: one": "again", "demo: another": "all", "190M: one": "large"}
    alone = run("other threads", 40, "demo", "one", threads=1)
    assert [row["tokens/s"] for row in alone["rows"]] == [40, 41], "they do not compare"
    assert [*alone["commands"]] == ["demo: one"]
