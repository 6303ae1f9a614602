"""``outrider generate``: what it asks, and what it prints where."""

import io
import sys
from collections.abc import Iterator

import grpc
import pytest

from outrider.cli.answer_output import is_coloured
from outrider.cli.command_line import main
from outrider.cli.conversation import converse
from outrider.cli.service import API_KEY
from outrider.client import answer as answers
from outrider.client.client import Client
from outrider.learning.backoff import Backoff
from tests.fakes.text_gateway import TEXT, TextGateway, serving


class Terminal(io.StringIO):
    """Standard input that is a terminal without a line."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def gateway(monkeypatch) -> Iterator[tuple[TextGateway, str]]:
    monkeypatch.setattr(answers, "PAUSE", Backoff(0.001, 3.0))
    with serving(TextGateway()) as served:
        yield served


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


def test_page_colours_show_where_tokens_come_from(gateway, capsys):
    _, address = gateway
    main(["generate", "x", "--address", address, "--color", "always"])
    out, err = capsys.readouterr()
    assert out.startswith("\033[32mThe \033[0m")
    assert "accepted" in err


def test_failure_is_one_line_that_says_what_to_do(gateway, capsys):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.UNAUTHENTICATED
    assert main(["generate", "x", "--address", address]) == 1
    assert capsys.readouterr().err == "outrider: gone; put an API key into OUTRIDER_API_KEY\n"


def test_command_line_sends_a_schema_from_a_file(gateway, capsys, tmp_path):
    script, address = gateway
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert main(["generate", "x", "--address", address, "--schema", str(file)]) == 0
    assert script.schemas == ['{"type": "object"}']
    assert main(["generate", "x", "--address", address, "--schema", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
    assert len(script.schemas) == 1


def test_failure_in_the_middle_ends_the_line_of_the_answer_first(gateway, capsys):
    script, address = gateway
    script.breaks, script.code = [1], grpc.StatusCode.INTERNAL
    assert main(["generate", "x", "--address", address]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("The \n", "outrider: gone\n")


@pytest.mark.parametrize(
    ("when", "terminal", "coloured"),
    [("auto", True, True), ("auto", False, False), ("always", False, True), ("never", True, False)],
)
def test_colours_go_into_a_pipe_only_if_they_always_do(monkeypatch, when, terminal, coloured):
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    assert is_coloured(when) is coloured


def test_command_line_sends_a_message_as_a_chat(gateway, capsys):
    script, address = gateway
    assert main(["generate", "--chat", "Hi", "--address", address]) == 0
    assert capsys.readouterr().out == TEXT + "\n"
    assert script.chats == [[("user", "Hi")]]


def test_command_line_without_a_prompt_reads_a_pipe_and_refuses_a_terminal(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert main(["generate", "--address", address]) == 0
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "--address", address]) == 1
    assert "give a prompt, or --chat" in capsys.readouterr().err
    assert script.prompts == ["piped"]


def said(*lines: str | type[BaseException]):
    """Returns what stands for ``input``: lines and what ends them, then the end of the input."""
    rest = iter((*lines, EOFError))

    def ask(_: str) -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    return ask


def test_conversation_keeps_its_history_until_the_input_ends(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setattr("builtins.input", said("Hi", "", KeyboardInterrupt, "More"))
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "--chat", "--address", address]) == 0
    assert script.chats == [[("user", "Hi")], [("user", "Hi"), ("assistant", TEXT), ("user", "More")]]
    assert capsys.readouterr().out.count(TEXT + "\n") == 2


def test_conversation_forgets_a_message_whose_answer_fails(gateway, capsys, monkeypatch):
    script, address = gateway
    script.breaks, script.code = [0], grpc.StatusCode.INVALID_ARGUMENT
    monkeypatch.setattr("builtins.input", said("Hi", "Again"))
    with Client(address) as client:
        assert converse(client, {}, coloured=False) == 0
    assert "outrider: gone\n" in capsys.readouterr().err
    assert script.chats == [[("user", "Hi")], [("user", "Again")]]


def test_conversation_interrupted_in_an_answer_keeps_what_was_said(gateway, capsys, monkeypatch):
    script, address = gateway
    monkeypatch.setattr("builtins.input", said("Hi", "More"))
    taken = answers.AnswerReading.take

    def interrupted(reading, chunk):
        taken(reading, chunk)
        if len(script.chats) == 1 and len(reading._answer.pieces) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(answers.AnswerReading, "take", interrupted)
    with Client(address) as client:
        assert converse(client, {}, coloured=False) == 0
    (_, (_, shown), _) = script.chats[1]
    assert TEXT.startswith(shown)
    assert 0 < len(shown) < len(TEXT)
