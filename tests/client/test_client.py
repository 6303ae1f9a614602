"""Client finishes its answer though gateways are lost on the way, and yields no token twice."""

import io
import re
import threading
from collections.abc import Iterator
from concurrent import futures
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest

from outrider.cli.command_line import main
from outrider.cli.service import API_KEY
from outrider.client import client as generation
from outrider.client.client import Client
from outrider.learning.backoff import Backoff
from protos import generation_pb2, generation_pb2_grpc

CHUNKS = [([5], ["The "]), ([6, 7, 8], ["c", "", "ä"]), ([9], ["t"]), ([10, 11], [" s", "at"])]
TEXT = "The cät sat"
TOKENS = [5, 6, 7, 8, 9, 10, 11]
SEED = 77


class Gateway(generation_pb2_grpc.GenerationServicer):
    """Answers from CHUNKS, cut differently in every attempt; breaks as its script says."""

    def __init__(self) -> None:
        self.breaks: list[int] = []  # chunks after which each attempt in turn breaks
        self.code, self.details = grpc.StatusCode.UNAVAILABLE, "gone"
        self.seeds: list[int | None] = []
        self.metadata: dict[str, str] = {}
        self.schemas: list[str] = []
        self.prompts: list[str] = []

    def Generate(self, request, context) -> Iterator[generation_pb2.GenerateChunk]:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        self.schemas.append(request.structured_outputs.json)
        self.prompts.append(request.text)
        self.seeds.append(request.sampling.seed if request.sampling.HasField("seed") else None)
        breaks_after = self.breaks.pop(0) if self.breaks else None
        tokens = [pair for ids, texts in CHUNKS for pair in zip(ids, texts, strict=True)]
        size = len(self.seeds)
        chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        for number, chunk in enumerate(chunks):
            if number == breaks_after:
                context.abort(self.code, self.details)
            is_last = number == len(chunks) - 1
            yield generation_pb2.GenerateChunk(
                token_ids=[id_ for id_, _ in chunk],
                origins=[generation_pb2.ORIGIN_ACCEPTED] * len(chunk),
                text="".join(text for _, text in chunk),
                text_lengths=[len(text) for _, text in chunk],
                seed=SEED if number == 0 else None,
                finish_reason="length" if is_last else None,
                usage=generation_pb2.Usage(completion_tokens=len(tokens)) if is_last else None,
            )


@pytest.fixture
def gateway(monkeypatch) -> Iterator[tuple[Gateway, str]]:
    monkeypatch.setattr(generation, "PAUSE", Backoff(0.001, 3.0))
    gateway = Gateway()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gateway, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("second", [0, 2])
def test_answer_that_broke_is_finished_with_the_same_text(gateway, first, second):
    script, address = gateway
    script.breaks = [first, second]
    with Client(address) as client:
        answer = client.generate("x")
        pieces = list(answer)
    assert "".join(piece.text for piece in pieces) == TEXT
    assert [piece.token_id for piece in pieces] == TOKENS
    assert (answer.repeats, answer.finish_reason, answer.seed) == (2, "length", SEED)
    assert script.seeds[0] is None
    assert script.seeds[1] == (None if first == 0 else SEED)


@pytest.mark.parametrize("page", ["README.md", "docs/clients.md"])
def test_example_of_a_page_prints_the_answer(gateway, capsys, page):
    _, address = gateway
    text = (Path(__file__).parents[2] / page).read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    (example,) = (example for example in examples if "import Client" in example)
    exec(example.replace("127.0.0.1:9000", address), {})
    assert capsys.readouterr().out.startswith(TEXT)


def test_answer_of_a_wrong_request_is_not_tried_again(gateway):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.INVALID_ARGUMENT
    with Client(address) as client, pytest.raises(grpc.RpcError, match="gone"):
        list(client.generate("x"))
    assert len(script.seeds) == 1


@pytest.mark.parametrize(
    ("details", "is_repeated"),
    [
        ("The actor died unexpectedly before finishing this task.", True),
        ("The actor 94f1 is unavailable: Actor is unavailable.. The task may have been executed.", True),
        ("The actor 0a is unavailable: The actor is temporarily unavailable: Socket closed", True),
        ("KeyError: a defect", False),
    ],
)
def test_answer_after_internal_is_tried_again_only_for_a_lost_gateway(gateway, details, is_repeated):
    script, address = gateway
    script.breaks, script.code, script.details = [2], grpc.StatusCode.INTERNAL, details
    with Client(address) as client:
        answer = client.generate("x")
        if is_repeated:
            assert [piece.token_id for piece in answer] == TOKENS
        else:
            with pytest.raises(grpc.RpcError, match="defect"):
                list(answer)
    assert answer.repeats == is_repeated


def test_answer_without_tokens_raises_after_the_patience(gateway):
    script, address = gateway
    script.breaks = [0] * 10_000
    with Client(address, patience_s=0.05) as client, pytest.raises(grpc.RpcError, match="gone"):
        list(client.generate("x"))


def test_answer_that_is_not_read_to_its_end_is_cancelled(gateway):
    _, address = gateway
    before = threading.active_count()
    with Client(address) as client:
        pieces = iter(client.generate("x"))
        assert next(pieces).text == "The "
        pieces.close()
    assert threading.active_count() <= before + 2


def test_command_line_streams_text_and_prints_the_record(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setenv(API_KEY, "secret")
    assert main(["generate", "x", "--address", address, "--seed", "3", "--stop", "END"]) == 0
    out, err = capsys.readouterr()
    assert out == TEXT + "\n"
    assert "7 tokens in" in err
    assert script.seeds == [3]
    assert script.metadata["authorization"] == "Bearer secret"


def test_command_line_reads_the_prompt_from_the_standard_input(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", "-", "--address", address]) == 0
    assert capsys.readouterr().out == TEXT + "\n"
    assert script.prompts == ["two\nlines\n"]


def test_command_line_refuses_a_standard_input_that_is_no_text(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(["generate", "-", "--address", address]) == 1
    assert "the standard input is no text in utf-8" in capsys.readouterr().err
    assert not script.prompts


def test_command_line_tells_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"outrider {version('outrider')}\n"


def test_page_colours_show_where_tokens_come_from(gateway, capsys):
    _, address = gateway
    main(["generate", "x", "--address", address, "--color"])
    out, err = capsys.readouterr()
    assert out.startswith("\033[32mThe \033[0m")
    assert "accepted" in err


def test_failure_is_one_line_that_says_what_to_do(gateway, capsys):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.UNAUTHENTICATED
    assert main(["generate", "x", "--address", address]) == 1
    assert capsys.readouterr().err.strip() == "outrider: gone; put an API key into OUTRIDER_API_KEY"


def test_command_line_sends_a_schema_from_a_file(gateway, capsys, tmp_path):
    script, address = gateway
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert main(["generate", "x", "--address", address, "--schema", str(file)]) == 0
    assert script.schemas == ['{"type": "object"}']
    assert main(["generate", "x", "--address", address, "--schema", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
    assert len(script.schemas) == 1
