"""Recorded traffic is read in whole lines, the newest first, up to the wanted number."""

from pathlib import Path

import pytest

from gateway.recorded_answers import RecordedAnswer, read_folder


def kept(*prompt: int, task: str | None = None) -> RecordedAnswer:
    return RecordedAnswer(prompt=prompt, answer=(7, 8), temperature=0.7, task=task)


def write(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines))


def test_recorded_line_holds_token_ids_temperature_and_label() -> None:
    assert kept(1, 2).line() == '{"prompt":[1,2],"answer":[7,8],"temperature":0.7}\n'
    assert kept(1, task="chat").line().endswith('"temperature":0.7,"task":"chat"}\n')


def test_recorded_answers_newest_come_first_from_all_folders(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1000-x.jsonl", kept(1).line(), kept(2).line())
    write(tmp_path / "b" / "2000-y.jsonl", kept(3).line())
    assert [recorded.prompt for recorded in read_folder(tmp_path, 9)] == [(3,), (2,), (1,)]
    assert [recorded.prompt for recorded in read_folder(tmp_path, 2)] == [(3,), (2,)]


def test_recorded_line_that_is_incomplete_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "1000-x.jsonl", kept(1, task="Zürich\u2028Süd").line(), kept(2).line()[:9])
    assert [recorded.prompt for recorded in read_folder(tmp_path, 9)] == [(1,)]


def test_recorded_answers_empty_folder_is_refused_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no recorded traffic: the setting gateway.record has"):
        read_folder(tmp_path, 9)


def test_recorded_line_of_another_kind_is_refused_by_its_place(tmp_path: Path) -> None:
    write(tmp_path / "1000-x.jsonl", kept(1).line(), '{"prompt":["secret"],"answer":[],"temperature":1}\n')
    with pytest.raises(
        ValueError, match=r"1000-x.jsonl:2: prompt.0: Input should be a valid integer"
    ) as error:
        read_folder(tmp_path, 9)
    assert "secret" not in str(error.value)
