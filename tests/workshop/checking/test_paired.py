"""``outrider check --paired``: common noise before and after a change, and old answers that draft."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.check_command import DIFFERENT, SAME, UNKNOWN
from outrider.cli.command_line import main
from outrider.demo.prompts import prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 8
OPTIONS = ["--answer-tokens", "16", "--fresh", "true", "--json", "-"]


def written(folder: Path, *lines: Any) -> str:
    path = folder / "items.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def items(changed: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "changed": changed, **more} for prompt in prompts("prose", COUNT)]


async def paired(
    addresses: tuple[str, str], capsys: pytest.CaptureFixture[str], path: str, *options: str
) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the paired part of the report."""
    command = ["check", *addresses, "--paired", path, *OPTIONS, *options]
    code = await asyncio.to_thread(main, command)
    return code, json.loads(capsys.readouterr().out)["paired"]


async def test_paired_without_a_change_is_the_same_in_fewer_passes(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = await paired(addresses, capsys, written(tmp_path, *items({})), "--a-speculation", "off")
    assert code == SAME
    assert (found["items"], found["differences"], found["other_than_fresh"]) == (COUNT, [], 0)
    assert found["interval"] == [0.0, 0.0]
    before, after, *_ = found["runs"]
    assert after["tokens"] == before["tokens"]
    assert after["target_passes"] < before["target_passes"] / 2
    assert found["accepted_predictions"] > 0.8 * after["tokens"]


async def test_paired_with_a_small_change_parts_late_and_drafts_what_stays(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = await paired(addresses, capsys, written(tmp_path, *items({"temperature": 0.9})))
    assert found["other_than_fresh"] == 0
    assert 0 < len(found["differences"]) < COUNT or found["accepted_predictions"] > 0
    _, _, _, independent = found["runs"]
    assert independent["name"] == "run B with other seeds"


async def test_paired_with_a_change_of_the_score_is_a_difference(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, *items({"max_tokens": 4}))
    code = await asyncio.to_thread(main, ["check", *addresses, "--paired", path, "--answer-tokens", "16"])
    said = capsys.readouterr().out
    assert code == DIFFERENT
    assert said.startswith("# They differ\n\n- length moves by -")
    assert f"0 of {COUNT} answers are identical." in said


@pytest.mark.parametrize(("expected", "score"), [("", "contains"), ("never said", "exact")])
async def test_paired_scores_answers_by_what_is_expected(
    addresses: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    expected: str,
    score: str,
) -> None:
    path = written(tmp_path, *items({}, expected=expected))
    _, found = await paired(addresses, capsys, path, "--score", score)
    assert found["mean_a"] == found["mean_b"] == (score == "contains")


@pytest.mark.parametrize(
    ("lines", "score", "told"),
    [
        ([{"prompt": "x"}], "length", "at least 2 are needed"),
        ([{"prompt": "x"}, {"prompt": "y"}], "exact", '"expected" is missing'),
        ([{"prompt": "x"}, {"expected": "y"}], "length", "line 2: prompt: Field required"),
    ],
)
async def test_paired_items_that_cannot_be_scored_are_refused(
    addresses: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[dict[str, str]],
    score: str,
    told: str,
) -> None:
    command = ["check", *addresses, "--paired", written(tmp_path, *lines), "--score", score]
    assert await asyncio.to_thread(main, command) == UNKNOWN
    assert told in capsys.readouterr().err
