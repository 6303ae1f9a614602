"""Grammars that end the process that compiles them: the sandbox tells so, and nothing else is lost."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from llguidance import LLMatcher

from outrider.decoding.grammar import MAX_GRAMMAR, GrammarError, compiled
from outrider.decoding.grammar_sandbox import MEMORY, GrammarSandbox, SandboxError, SandboxVocabulary
from outrider.engine.loop.grammars import COMPILE_STACK
from tests.support.grammars import ENDS, GRAMMARS, VOCAB_SIZE, json_grammar, lark_grammar, tokenizer, tokens
from tests.support.patience import LIMIT_S, START_S, wait_until

Processes = Callable[[], list[psutil.Process]]

ROOT = Path(__file__).parents[2]
VOCABULARY = SandboxVocabulary(tokenizer().to_str(), VOCAB_SIZE, ENDS)
TIME_S = 5  # processor seconds: more than any grammar takes here that is to pass
ENDLESS = json_grammar({"type": "integer", "multipleOf": 99_999_989})


def chain(rules: int) -> str:
    """Each rule is the next one."""
    lines = ["start: r0", *(f"r{rule}: r{rule + 1}" for rule in range(rules)), f'r{rules}: "a"']
    return lark_grammar("\n".join(lines))


def references(links: int, link: Callable[[dict[str, str]], dict[str, Any]]) -> str:
    """Each definition refers to the next one."""
    following = ({"$ref": f"#/$defs/d{number + 1}"} for number in range(links))
    definitions = {f"d{number}": link(reference) for number, reference in enumerate(following)}
    return json_grammar({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "integer"}}})


DEEP = {
    "rules": chain(3500),
    "terminals": lark_grammar(
        "\n".join(["start: T0", *(f'T{n}: "b" T{n + 1} "c"' for n in range(5000)), 'T5000: "a"'])
    ),
    "references": references(2300, lambda reference: reference),
    "arrays": references(2000, lambda reference: {"items": reference}),
    "all of": references(2000, lambda reference: {"allOf": [reference, {}]}),
}


HOLDER = """
import sys
from outrider.decoding.grammar_sandbox import GrammarSandbox
from tests.decoding.test_grammar_sandbox import ENDLESS, VOCABULARY

GrammarSandbox(VOCABULARY).run(ENDLESS, 60)
"""


@pytest.fixture
def sandbox(processes: Processes) -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(VOCABULARY)
    yield sandbox
    sandbox.close()


@pytest.fixture
def processes() -> Processes:
    """Returns the program of this test, and its forks; there may be programs of other tests."""
    before = {*below(os.getpid())}
    return lambda: [child for child in below(os.getpid()) if child not in before]


def below(process: int) -> list[psutil.Process]:
    """Sandboxes of that process, and their forks."""
    children = psutil.Process(process).children(recursive=True)
    return [child for child in children if any("grammar_sandbox_main" in word for word in child.cmdline())]


def test_run_grammars_of_every_kind_pass(sandbox: GrammarSandbox) -> None:
    for grammar in GRAMMARS.values():
        assert sandbox.run(grammar, TIME_S) > 0


def test_run_grammar_deeper_than_the_stack_is_refused_and_the_next_passes(sandbox: GrammarSandbox) -> None:
    with pytest.raises(GrammarError, match="refers to its own parts too deeply"):
        sandbox.run(chain(7000), TIME_S)
    assert sandbox.run(GRAMMARS["regex"], TIME_S) > 0


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("kind", DEEP)
def test_run_deep_grammar_that_passes_overflows_no_thread_that_compiles_or_follows(
    sandbox: GrammarSandbox, kind: str
) -> None:
    """Runs in a process of its own, since what is tested would end this process.

    Threads that follow answers have eight megabytes or two: an eighth of the least is plenty.
    """
    sandbox.run(DEEP[kind], TIME_S)
    assert in_fork(DEEP[kind], COMPILE_STACK, following=2**18) == 0


def test_run_grammar_that_takes_too_long_is_refused(sandbox: GrammarSandbox) -> None:
    with pytest.raises(GrammarError, match="takes more than 1 s of processor time to compile"):
        sandbox.run(ENDLESS, 1)


def test_run_grammar_whose_fork_is_aborted_takes_too_much_memory(
    sandbox: GrammarSandbox, processes: Processes
) -> None:
    """The library aborts its process when it is given no more memory."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.run, ENDLESS, 60)
        wait_until(lambda: len(processes()) == 2)
        processes()[1].send_signal(signal.SIGABRT)
        with pytest.raises(GrammarError, match=f"takes more than {MEMORY // 2**20} MiB to compile"):
            running.result(LIMIT_S)


def test_run_grammar_that_takes_long_holds_up_no_other(sandbox: GrammarSandbox, processes: Processes) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.run, ENDLESS, 60)
        wait_until(lambda: len(processes()) == 2)
        assert sandbox.run(GRAMMARS["person"], TIME_S) > 0
        assert not running.done()
        sandbox.close()
        with pytest.raises(SandboxError):
            running.result(LIMIT_S)
    assert not processes()


def test_run_program_was_killed_starts_another_and_tries_again(
    sandbox: GrammarSandbox, processes: Processes
) -> None:
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.run, ENDLESS, 60)
        wait_until(lambda: len(processes()) == 2)
        lost = processes()
        lost[0].kill()
        gone, alive = psutil.wait_procs(lost, LIMIT_S)
        assert (len(gone), alive) == (2, [])
        wait_until(lambda: len(processes()) == 2, START_S)
        assert not running.done()
        sandbox.close()
        with pytest.raises(SandboxError):
            running.result(LIMIT_S)


def test_run_grammar_too_long_is_refused_without_a_process(
    sandbox: GrammarSandbox, processes: Processes
) -> None:
    with pytest.raises(GrammarError, match=f"at most {MAX_GRAMMAR} are accepted"):
        sandbox.run(" " * (MAX_GRAMMAR + 1), TIME_S)
    assert not processes()


def test_program_process_that_asked_is_killed_leaves_nothing_behind() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT)
    try:
        wait_until(lambda: len(below(holder.pid)) == 2, START_S)
        left = below(holder.pid)
    finally:
        holder.kill()
        holder.wait()
    gone, alive = psutil.wait_procs(left, LIMIT_S)
    assert (len(gone), alive) == (2, [])


def in_fork(grammar: str, compiling: int, following: int) -> int:
    """Returns the status of a fork that compiles the grammar, and follows it for some tokens.

    Args:
        compiling: bytes of the stack for it.
        following: bytes of the stack for that.
    """
    table = tokens()
    process = os.fork()
    if not process:
        try:
            matcher = in_thread(compiling, lambda: compiled(grammar, table))
            in_thread(following, lambda: follow(matcher.deep_copy()))
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1]


def in_thread(stack: int, work: Callable[[], Any]) -> Any:
    done: list[Any] = []
    threading.stack_size(stack)
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    return done[0]


def follow(matcher: LLMatcher) -> None:
    for _ in range(40):
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        matcher.compute_ff_tokens()
        token = int(allowed.argmax())
        if not allowed.any() or not matcher.try_consume_tokens([token]):
            break
    matcher.rollback(1)
