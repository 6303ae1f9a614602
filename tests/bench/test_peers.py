"""How peers are asked and timed."""

import importlib.util
import json
from pathlib import Path

from bench.peers.answering import Answers, Task, answer_task
from bench.peers.compare import PEERS


def task(path: Path) -> Task:
    return Task(
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


def test_a_task_is_answered_by_streams_and_then_with_seeds(tmp_path):
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


def test_every_peer_is_a_module():
    for peer in PEERS.values():
        assert importlib.util.find_spec(f"bench.peers.{peer.module}")
