"""Grammars of requests, tried before anything reaches a worker: shared, bounded by the deadline, given up."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from gateway.errors import DeadlineError, InvalidRequestError
from gateway.generation.form import AT_ONCE, Form, GrammarChecks
from outrider.decoding.grammar import GrammarError
from outrider.decoding.grammar_sandbox import GrammarSandbox
from tests.support.patience import LIMIT_S, eventually, later


class Gate:
    """Checks that end when they are let."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.may_end = threading.Event()

    def run(self, sandbox: GrammarSandbox, grammar: str, processor_s: int) -> int:
        self.tried.append(grammar)
        self.may_end.wait(LIMIT_S)
        if "bad" in grammar:
            raise GrammarError("it is bad")
        return 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(GrammarSandbox, "run", lambda *arguments: gate.run(*arguments))
    yield gate
    gate.may_end.set()


@pytest.fixture
def grammars(tokenizer: Tokenizer, gate: Gate) -> Iterator[GrammarChecks]:
    grammars = GrammarChecks(tokenizer, compile_s=2)
    yield grammars
    gate.may_end.set()
    grammars.close()


def form(regex: str) -> Form:
    return Form("regex", regex, "the field")


async def test_grammar_several_requests_ask_is_checked_once(grammars: GrammarChecks, gate: Gate) -> None:
    asked = [asyncio.create_task(grammars.grammar(form("a"), later(LIMIT_S))) for _ in range(3)]
    await eventually(lambda: gate.tried)
    gate.may_end.set()
    assert len({*await asyncio.gather(*asked)}) == 1
    await grammars.grammar(form("a"), later(LIMIT_S))
    assert len(gate.tried) == 1


async def test_grammar_cannot_be_compiled_names_the_field(grammars: GrammarChecks, gate: Gate) -> None:
    gate.may_end.set()
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="the field: it is bad"):
            await grammars.grammar(form("bad"), later(LIMIT_S))
    assert len(gate.tried) == 1


async def test_grammar_takes_longer_than_the_deadline_ends_there(grammars: GrammarChecks, gate: Gate) -> None:
    with pytest.raises(DeadlineError):
        await grammars.grammar(form("a"), later(0))


async def test_grammar_without_a_waiting_request_is_not_checked(grammars: GrammarChecks, gate: Gate) -> None:
    asked = [
        asyncio.create_task(grammars.grammar(form(f"a{number}"), later(LIMIT_S)))
        for number in range(AT_ONCE + 3)
    ]
    await eventually(lambda: len(gate.tried) == AT_ONCE)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    gate.may_end.set()
    await grammars.grammar(form("last"), later(LIMIT_S))
    assert len(gate.tried) == AT_ONCE + 1


async def test_grammar_sandbox_was_lost_asks_again(
    grammars: GrammarChecks, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.may_end.set()
    with monkeypatch.context() as lost:
        lost.setattr(GrammarSandbox, "run", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await grammars.grammar(form("a"), later(LIMIT_S))
    assert await grammars.grammar(form("a"), later(LIMIT_S))
