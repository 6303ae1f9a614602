"""`python -m bench drafters`: heads that are inflated guess the same, runs go on, services are as asked."""

import json
from itertools import cycle
from pathlib import Path

import grpc
import pytest

from bench import checkpoints, drafters, report, trees
from bench.drafters import Kept
from bench.drafters_served import Asked, Asking, Windows, served
from bench.drafting import DRAFTED_BY, SCOPE, Pairs, asked_of
from bench.inflate import Size
from cluster.arguments import read_settings
from outrider.demo.prompts import prompts
from outrider.drafters.past_answers import PastAnswers
from outrider.engine.offline.speculate import generate
from protos import generation_pb2, generation_pb2_grpc

SIZE = "a little larger"
LARGER = Size(hidden=384, layers=8, intermediate=640, heads=12, kv_heads=6)
SMALL = ["--kinds", "code", "json", "--threads", "1", "--prompts", "2", "--tokens", "8", "--answer", "4"]


@pytest.fixture
def inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoints, "FOLDER", tmp_path)
    monkeypatch.setitem(checkpoints.INFLATED, SIZE, LARGER)
    return SIZE


def some_requests(count: int = 2, tokens: int = 24):
    return asked_of([*prompts("code", count), *prompts("arithmetic", count)], 0.7, tokens)


@pytest.mark.parametrize("name", ["eagle3", "medusa", "exit after 2"])
def test_heads_inflated_with_their_target_guess_what_they_guessed(name: str, inflated: str) -> None:
    before, after = (Pairs(size, 1).of(name).tally(some_requests(), 4) for size in (None, inflated))
    assert sum(before.accepted) > 5
    assert (after.rounds, after.reached, after.accepted) == (before.rounds, before.reached, before.accepted)


def test_a_tally_counts_what_generate_counts() -> None:
    requests = some_requests()
    pair = Pairs(None, 1).of("ngram")
    tally, outputs = pair.tally(requests, 4), generate(pair.target, pair.drafter, requests, 4)
    passes = sum(output.target_passes for output in outputs)
    assert tally.rounds == passes - 2 * len(requests)  # one takes the prompt in, one ends the text
    assert tally.drafts < tally.rounds
    assert 0 < tally.drafting_s < tally.seconds


def test_streams_ask_one_after_the_other_until_there_are_tokens_enough() -> None:
    pair = Pairs(None, 1).of("plain")
    tally = pair.tally(cycle(some_requests(tokens=6)), 0, streams=3, tokens=40)
    assert 40 <= tally.tokens_since < 40 + 3
    assert tally.passes == pytest.approx(40 / 3, abs=3)  # a prompt may take a pass of its own
    assert (tally.drafts, tally.tokens_per_pass) == (0, 1.0)
    assert not pair.target.has_work


def test_what_is_mixed_comes_from_suffixes_where_past_answers_hold_the_text() -> None:
    requests, pairs, past = some_requests(), Pairs(None, 1), PastAnswers(2**12)
    for output in generate(pairs.of("plain").target, None, requests, 0):
        past.add(SCOPE, output.tokens)
    alone = pairs.of("model").tally(requests, 4)
    assert pairs.of("model+suffix", past).tally(requests, 4).rounds < 0.75 * alone.rounds


def test_a_run_goes_on_where_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(drafters, "RESULTS", tmp_path)
    kept = Kept()
    assert kept.begin("counts", depth=4) == []
    kept.add("counts", [{"drafter": "model"}])
    assert drafters.without(Kept().begin("counts", depth=4), ["model", "ngram"]) == ["ngram"]
    assert Kept().begin("counts", depth=3) == []  # measured in another way


def test_requests_to_a_service_name_a_drafter_that_it_has(inflated: str) -> None:
    named: list[str] = []
    for one in served(inflated, drafters.EXIT_AFTER):
        given = {"target": checkpoints.inflated_target(inflated), **one.settings}
        settings = read_settings({name: str(value) for name, value in given.items()})
        for drafter in one.named.values():
            assert settings.gateway_settings().roster.find(drafter).name == drafter
        named += one.named
    assert {*named} == {*DRAFTED_BY} - {f"exit after {layers}" for layers in (2, 3, 4)}


class Generation(generation_pb2_grpc.GenerationServicer):
    """Answers at once, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[generation_pb2.GenerateRequest] = []

    async def Generate(self, request, context):  # noqa: N802
        self.asked.append(request)
        yield generation_pb2.GenerateChunk(token_ids=[1], origins=[generation_pb2.ORIGIN_PLAIN])

    async def GetLoads(self, request, context):  # noqa: N802
        return generation_pb2.Loads()


async def test_no_request_to_a_service_comes_twice() -> None:
    """Past answers that hold the very text would flatter suffixes."""
    server, service = grpc.aio.server(), Generation()
    generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        asking = Asking(generation_pb2_grpc.GenerationStub(channel))
        for streams in (1, 8):
            for drafter in (None, "suffix", "suffix"):
                await asking.answers(Asked("code", drafter, 0.7), streams, Windows(0.0, 0.02, 0.1))
    await server.stop(None)
    assert len({(one.text, one.sampling.seed) for one in service.asked}) == len(service.asked) > 20
    assert {(one.task, one.speculation.mode) for one in service.asked} == {
        ("code, None", "off"),
        ("code, suffix", "auto"),
    }


@pytest.mark.slow
def test_a_row_for_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inflated: str) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(drafters, "RESULTS", tmp_path)
    drafters.main([*SMALL, "--parts", "counts", "engine", "--target", inflated])
    parts = json.loads((tmp_path / "drafters.json").read_text())["parts"]
    cells = [(name, kind, heat) for name in DRAFTED_BY for kind in ("code", "json") for heat in (0.7, 1.0)]
    found = [(row["drafter"], row["kind"], row["temperature"]) for row in parts["counts"]["rows"]]
    assert found == cells
    assert len(parts["engine"]["rows"]) == 2 * len(cells)
    assert all(row["to plain"] > 0 for row in parts["engine"]["rows"])


@pytest.mark.slow
def test_trees_are_counted_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inflated: str) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    small = "--drafters eagle3 --kinds code json --leaves 0 4 --prompts 2 --tokens 16 --answer 8"
    trees.main([*small.split(), "--repetitions", "1", "--target", inflated])
    found = json.loads((tmp_path / "trees.json").read_text())
    assert [(row["kind"], row["leaves"]) for row in found["rows"]] == [
        (kind, leaves) for kind in ("code", "json") for _ in (0.0, 0.7) for leaves in (0, 4)
    ]
    assert [row["leaves"] for row in found["times"]] == [0, 4]
    assert all(row["to plain"] > 0 and row["pass / target step"] > 0 for row in found["times"])
