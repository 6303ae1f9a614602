"""Race of plain decoding and speculation: what is asked, what is compared, what is recorded."""

import json
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from outrider.cli.command_line import main
from outrider.cli.race_command import RACED, RacedAnswer, RaceRun, table
from outrider.client.answer import AnswerPiece
from outrider.demo.prompts import prompts
from protos import generation_pb2, generation_pb2_grpc

TOKENS = {"a": 5, "b": 6, "ä": 7}


class Gateway(generation_pb2_grpc.GenerationServicer):
    """Answers "abä", or "aba" with speculation if ``is_wrong``, or nothing if it ``refuses``."""

    def __init__(self) -> None:
        self.is_wrong = self.refuses = False
        self.asked: list[tuple[str, str, int, int]] = []  # prompt, mode, tokens, seed

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        if self.refuses:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature is -1")
        mode, sampling = request.speculation.mode, request.sampling
        self.asked.append((request.text, mode, sampling.max_tokens, sampling.seed))
        text = "aba" if self.is_wrong and mode == "auto" else "abä"
        origin = generation_pb2.ORIGIN_PLAIN if mode == "off" else generation_pb2.ORIGIN_ACCEPTED
        for letter in text:
            yield generation_pb2.GenerateChunk(
                token_ids=[TOKENS[letter]],
                origins=[origin],
                text=letter,
                text_lengths=[1],
                seed=sampling.seed,
            )
        speculation = generation_pb2.SpeculationCounts(target_passes=3, drafted=4, accepted=2)
        usage = generation_pb2.Usage(completion_tokens=3, speculation=speculation)
        yield generation_pb2.GenerateChunk(finish_reason="length", usage=usage)


@pytest.fixture
def gateway() -> Iterator[tuple[Gateway, str]]:
    server, gateway = grpc.server(futures.ThreadPoolExecutor(2)), Gateway()
    generation_pb2_grpc.add_GenerationServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gateway, f"127.0.0.1:{port}"
    server.stop(None)


def answer(text: str, *times: float) -> RacedAnswer:
    pieces = [AnswerPiece(letter, TOKENS[letter], "plain") for letter in text]
    return RacedAnswer(pieces, list(times), "length", {})


def race_run(plain: RacedAnswer, speculation: RacedAnswer) -> RaceRun:
    return RaceRun("x", 0, {"plain": plain, "speculation": speculation})


def test_race_alternates_who_goes_first_after_a_warm_up(gateway):
    service, address = gateway
    assert main(["race", "--address", address, "--kinds", "json", "--runs", "2", "--seed", "7"]) == 0
    first, second = prompts("json", 2)
    warm_up, tokens = 4, 128
    assert service.asked == [
        (first, "auto", warm_up, 7),
        (first, "off", tokens, 7),
        (first, "auto", tokens, 7),
        (second, "auto", warm_up, 8),
        (second, "auto", tokens, 8),
        (second, "off", tokens, 8),
    ]


def test_race_without_kinds_runs_the_four_of_the_demo(gateway, capsys):
    service, address = gateway
    assert main(["race", "--address", address]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[-4:]] == [*RACED]
    assert len(service.asked) == 3 * len(RACED)


def test_race_of_a_prompt_repeats_it_with_other_seeds(gateway):
    service, address = gateway
    assert main(["race", "--address", address, "--prompt", "Hello", "--runs", "2"]) == 0
    assert {(prompt, seed) for prompt, _, _, seed in service.asked} == {("Hello", 0), ("Hello", 1)}


def test_race_with_equal_texts_says_yes(gateway, capsys):
    assert main(["race", "--address", gateway[1], "--kinds", "code"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("yes")


def test_race_with_differing_texts_fails_and_says_from_where(gateway, capsys):
    service, address = gateway
    service.is_wrong = True
    assert main(["race", "--address", address, "--kinds", "code"]) == 1
    assert "NO: run 1 differs from token 3 on" in capsys.readouterr().out


def test_race_json_holds_figures_tokens_and_machine(gateway, tmp_path):
    file = tmp_path / "race.json"
    words = ["race", "--address", gateway[1], "--kinds", "code", "--runs", "2", "--json", str(file)]
    assert main(words) == 0
    record = json.loads(file.read_text())
    assert record["command"] == f"outrider {' '.join(words)}"
    assert record["machine"]["cores"] >= 1
    code = record["kinds"]["code"]
    assert code["same_text"] is True
    assert code["first_texts"]["plain"] == [["a", "plain"], ["b", "plain"], ["ä", "plain"]]
    assert code["first_texts"]["speculation"][2] == ["ä", "accepted"]
    first, second = code["runs"]
    assert (first["seed"], second["seed"]) == (0, 1)
    assert (first["plain"]["tokens"], first["speculation"]["accepted"]) == (3, 2)
    assert 0 < first["plain"]["first_token_s"] < first["plain"]["last_token_s"]


def test_race_whose_record_cannot_be_written_is_not_begun(gateway, tmp_path, capsys):
    file = tmp_path / "no folder" / "race.json"
    assert main(["race", "--address", gateway[1], "--json", str(file)]) == 1
    assert str(file) in capsys.readouterr().err
    assert gateway[0].asked == []


def test_speed_counts_from_the_first_token_to_the_last():
    assert answer("aba", 3.0, 3.5, 4.0).tokens_per_second == 2.0
    assert answer("a", 3.0).tokens_per_second is None


@pytest.mark.parametrize(
    ("plain", "speculation", "expected"),
    [("ab", "ab", None), ("ab", "aa", 1), ("ab", "a", 1), ("a", "ab", 1)],
)
def test_parts_at_of_two_texts_is_the_first_difference(plain, speculation, expected):
    run = race_run(answer(plain, *range(len(plain))), answer(speculation, *range(len(speculation))))
    assert run.parts_at == expected


def test_table_shows_medians_over_the_runs():
    plain = answer("aba", 0.0, 1.0, 2.0)  # 1 token per second
    runs = [race_run(plain, answer("aba", 0.0, end / 2, end)) for end in (0.2, 1.0, 2.0)]
    assert table({"code": runs}).splitlines()[-1].split() == ["code", "1.0", "2.0", "2.00", "yes"]


def test_table_without_speeds_shows_dashes():
    row = table({"code": [race_run(answer("a", 0.0), answer("a", 0.0))]}).splitlines()[-1]
    assert row.split() == ["code", "-", "-", "-", "yes"]


def test_race_with_too_many_runs_is_refused(capsys):
    assert main(["race", "--runs", "1000"]) == 1
    assert "prompts of kind 'code'" in capsys.readouterr().err


def test_race_without_runs_is_refused(capsys):
    assert main(["race", "--runs", "0"]) == 1
    assert "--runs 0: at least 1" in capsys.readouterr().err


def test_race_with_a_refused_request_says_why(gateway, capsys):
    service, address = gateway
    service.refuses = True
    assert main(["race", "--address", address]) == 1
    assert "temperature is -1" in capsys.readouterr().err
