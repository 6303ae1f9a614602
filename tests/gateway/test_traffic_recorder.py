"""Recorded traffic: which answers the folder holds and how long, and that it holds no text."""

import json
import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from gateway import traffic_recorder
from gateway.api.access import digest
from gateway.recorded_answers import RecordedAnswer, read_folder
from gateway.sequence import GatewaySequence
from gateway.settings import RecordSettings
from gateway.traffic_recorder import DIGEST_DIGITS, Offered, RecordFolder, TrafficRecorder
from outrider.decoding.settings import Sampling
from outrider.drafters.past_answers import Scope
from protos import generation_pb2
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import Context, servicer_of
from tests.support.http_calls import ANSWER, ASK, TEXT, client_of
from tests.support.patience import eventually, wait_until

KEYS = ["mine", "theirs"]
DAY_S = 86400.0


def settings(folder, **others):
    return {"fraction": 1.0, "folder": str(folder), **others}


def lines(folder):
    files = sorted(folder.rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def sequence(*prompt, caller=None, task=None):
    made = GatewaySequence(prompt, Sampling(temperature=0.5), 0, scope=Scope(caller, task))
    made.generated = [7, 8]
    return made


async def ask(client, key=None, **fields):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = await client.post("/v1/completions", json={**ASK, **fields}, headers=headers)
    assert response.status_code == 200, response.text


async def test_recorder_keeps_token_ids_and_no_text(tokenizer, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    async with client_of(tokenizer, ScriptedTarget(ANSWER), record=settings(tmp_path)) as client:
        await ask(client, temperature=0.5, task="letters", n=2)
        await eventually(lambda: len(lines(tmp_path)) == 2)
    wanted = {"prompt": [ord("x")], "answer": ANSWER, "temperature": 0.5, "task": "letters"}
    assert lines(tmp_path) == [wanted, wanted]
    written = "".join(file.read_text() for file in tmp_path.rglob("*.jsonl"))
    assert TEXT[:7] not in written + caplog.text
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.rglob("*.jsonl"))


async def test_recorder_keeps_answers_over_grpc_too(tokenizer, tmp_path):
    message = generation_pb2.GenerateRequest(
        text="x", sampling=generation_pb2.Sampling(max_tokens=len(ANSWER))
    )
    async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
        await servicer_of(fleet, tokenizer, record=settings(tmp_path)).Complete(message, Context())
        await eventually(lambda: lines(tmp_path))
    assert lines(tmp_path)[0]["answer"] == ANSWER


async def test_recorder_without_settings_keeps_nothing(tokenizer, tmp_path):
    for record in (None, settings(tmp_path / "kept", fraction=0.0)):
        async with fleet_of(ScriptedTarget(ANSWER)) as fleet:
            servicer = servicer_of(fleet, tokenizer, record=record)
            await servicer.Complete(generation_pb2.GenerateRequest(text="x"), Context())
            assert servicer.generation.recorder is None
    assert not (tmp_path / "kept").exists()


async def test_recorder_folder_of_an_api_key_can_be_deleted(tokenizer, tmp_path):
    record = settings(tmp_path, by_caller=True)
    mine, theirs = (tmp_path / digest(key)[:DIGEST_DIGITS] for key in KEYS)
    async with client_of(tokenizer, ScriptedTarget(ANSWER), keys=KEYS, record=record) as client:
        for key in KEYS:
            await ask(client, key)
        await eventually(lambda: len(lines(tmp_path)) == 2)
        assert [len(lines(folder)) for folder in (mine, theirs)] == [1, 1]
        for file in mine.iterdir():
            file.unlink()
        mine.rmdir()
        await ask(client, "mine")
        await eventually(lambda: lines(mine))
    assert len(lines(mine)) == 1


def test_recorder_keeps_the_named_callers_alone(tmp_path):
    record = RecordSettings(**settings(tmp_path, callers=(digest("mine")[:8],)))
    recorder = TrafficRecorder(record, "gateway")
    for number, caller in enumerate([digest("theirs"), digest("mine"), None]):
        recorder.offer(sequence(number, caller=caller))
    recorder.close()
    assert [line["prompt"] for line in lines(tmp_path)] == [[1]]


def test_recorder_keeps_a_fraction_of_the_answers(tmp_path):
    recorder = TrafficRecorder(RecordSettings(**settings(tmp_path, fraction=0.25)), "gateway")
    for number in range(800):
        recorder.offer(sequence(number))
    recorder.close()
    assert 120 < len(lines(tmp_path)) < 280  # 200 are expected; each bound is 6 standard deviations away


class Clock:
    now = 1_000_000.0

    def __call__(self):
        return self.now


def folder_of(tmp_path, **others):
    clock = Clock()
    return RecordFolder(RecordSettings(**settings(tmp_path, **others)), "gateway", clock), clock


def offered(tmp_path, number, tokens=100):
    return Offered(tmp_path, RecordedAnswer(prompt=(number,) * tokens, answer=(1,), temperature=1.0))


def test_recorder_folder_is_bounded_and_the_oldest_go_first(tmp_path):
    folder, clock = folder_of(tmp_path, max_bytes=2**14)
    for number in range(200):
        folder.write(offered(tmp_path, number))
        clock.now += 0.5
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2**14
    kept = [recorded.prompt[0] for recorded in read_folder(tmp_path, 1000)]
    assert kept == list(range(199, 199 - len(kept), -1))
    assert (
        len(kept) > 2**14 / len(offered(tmp_path, 199).answer.line()) * 0.8
    )  # at least 80 % of the space is used


def test_recorders_of_several_gateways_share_the_bound(tmp_path):
    clock = Clock()
    record = RecordSettings(**settings(tmp_path, max_bytes=2**14))
    folders = [RecordFolder(record, name, clock) for name in ("a", "b")]
    for number in range(100):
        for folder in folders:
            folder.write(offered(tmp_path, number))
            clock.now += 1.0
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2**14


def test_recorder_answer_larger_than_the_folder_is_not_kept(tmp_path):
    folder, _ = folder_of(tmp_path, max_bytes=2**12)
    folder.write(offered(tmp_path, 1))
    folder.write(offered(tmp_path, 2, tokens=4000))
    assert [line["prompt"][0] for line in lines(tmp_path)] == [1]


def test_recorder_deletes_answers_after_the_days(tmp_path):
    folder, clock = folder_of(tmp_path, days=1.0)
    for number in range(10):  # over 20 hours
        folder.write(offered(tmp_path, number))
        clock.now += 7200.0
    assert len(lines(tmp_path)) == 10
    clock.now = Clock.now + DAY_S + 1.0
    folder.tidy()
    assert [line["prompt"][0] for line in lines(tmp_path)] == list(range(1, 10))
    clock.now += DAY_S
    folder.tidy()
    assert lines(tmp_path) == []


def test_recorder_folder_that_cannot_be_written_costs_no_answer(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder, _ = folder_of(tmp_path / "file" / "below")
    for number in range(3):
        folder.write(offered(tmp_path / "file" / "below", number))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "record.folder=" in caplog.text


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"fraction": 1.5}, "fraction"),
        ({"folder": "kept"}, "folder"),
        ({"days": 0}, "days"),
        ({"callers": ["a key"]}, "callers.0"),
        ({"texts": True}, "texts"),
    ],
)
def test_record_settings_wrong_value_is_refused_by_name(tmp_path, given, field):
    with pytest.raises(ValidationError) as error:
        RecordSettings(**{**settings(tmp_path), **given})
    assert ".".join(map(str, error.value.errors()[0]["loc"])) == field


def test_recorder_goes_on_if_a_file_cannot_be_deleted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(traffic_recorder, "CLEAN_EVERY_S", 0.01)
    old = tmp_path / "1-x.jsonl"
    old.write_text("{}\n")
    with monkeypatch.context() as undo:
        undo.setattr(Path, "unlink", refuse)
        recorder = TrafficRecorder(RecordSettings(**settings(tmp_path, days=1e-3)), "gateway")
        wait_until(lambda: "cannot be written" in caplog.text)
    wait_until(lambda: not old.exists())
    recorder.close()
    assert caplog.text.count("cannot be written") == 1


def refuse(path, missing_ok=False):
    raise PermissionError(13, "Permission denied", str(path))


def test_recorder_hanging_thread_does_not_delay_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic_recorder, "END_WITHIN_S", 0.01)
    monkeypatch.setattr(traffic_recorder, "WAITING", 1)
    monkeypatch.setattr(TrafficRecorder, "_write_always", lambda self: None)
    recorder = TrafficRecorder(RecordSettings(**settings(tmp_path)), "gateway")
    recorder.offer(sequence(1))
    recorder.close()
