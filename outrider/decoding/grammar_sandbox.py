"""Compiles new grammars in a sandbox process: callers supply them, and the compiler is native code.

A grammar can overflow the stack of the thread that compiles it, run for minutes, or exhaust memory. In the
sandbox this harms only a process of its own, which has limits. A grammar that passes is compiled again by the
process that needs it, in a thread with a larger stack. Matching an answer needs no larger stack, however deep
the grammar is.

``grammar_sandbox_main`` is the program of that process: it reads the vocabulary once, and forks itself for
each grammar.
"""

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.decoding.grammar import MAX_GRAMMAR, GrammarError

STACK = 16 * 2**20  # bytes, for compiling a grammar; a chain of 2,000 rules takes about 8 MB
# Bytes of address space that a grammar may add. The largest accepted grammars take about 200 MB.
MEMORY = 512 * 2**20
# Timeout of an answer in seconds. CPU time is limited too, so only a stalled machine exceeds it.
LONGEST_WAIT_S = 120.0
JOIN_S = 5.0  # seconds that the program has to exit before it is killed
FOLDER = Path(__file__).parents[2]


logger = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """The sandbox was closed, or its program was lost twice for one grammar."""


@dataclass(frozen=True)
class SandboxVocabulary:
    """Vocabulary of a sandbox, as ``token_table`` takes it."""

    tokenizer: str  # text of tokenizer.json
    vocab_size: int
    end_token_ids: frozenset[int] = frozenset()


class GrammarSandbox:
    """Process that compiles grammars, started on first use. Ends with this object or the parent process."""

    def __init__(self, vocabulary: SandboxVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._program: _Program | None = None
        self._is_closed = False

    def start(self) -> None:
        """Starts the program if it does not run, without waiting for it."""
        self._running()

    def _running(self) -> "_Program":
        with self._lock:
            if self._is_closed:
                raise SandboxError("no more grammars are compiled: this process ends")
            if self._program is None or not self._program.runs:
                self._program = _Program(self._vocabulary)
                logger.debug("sandbox of grammars started")
            return self._program

    def run(self, grammar: str, processor_s: int) -> int:
        """Compiles a grammar and returns the bytes by which it raised peak memory. Blocks; thread-safe.

        Args:
            processor_s: seconds of CPU time that the grammar may take.

        Raises:
            GrammarError: the grammar cannot be compiled, or exceeds a limit; the message says which.
            SandboxError: the sandbox was closed or lost, so the result is unknown.
        """
        if len(grammar) > MAX_GRAMMAR:
            raise GrammarError(f"{len(grammar)} characters, at most {MAX_GRAMMAR} are accepted")
        for _ in range(2):  # a lost program is restarted once
            program = self._running()
            with suppress(OSError):
                if answer := program.ask(grammar, processor_s):
                    return _bytes(json.loads(answer), processor_s)
            logger.debug("sandbox of grammars lost on a grammar of %d characters", len(grammar))
            program.end()
        raise SandboxError("the sandbox of grammars was lost twice")

    def close(self) -> None:
        """Ends the program and its forks. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._program is not None:
                self._program.end()


class _Program:
    """Process of the program, and its control socket: the process exits when the socket closes."""

    def __init__(self, vocabulary: SandboxVocabulary) -> None:
        self._control, program_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with program_end, _file(pickle.dumps(vocabulary)) as file:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"{__package__}.grammar_sandbox_main",
                    str(program_end.fileno()),
                    str(file),
                ],
                pass_fds=[program_end.fileno(), file],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, sys.path)])},
            )
        self.end = weakref.finalize(self, _end, self._control, self._process)

    @property
    def runs(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def ask(self, grammar: str, processor_s: int) -> bytes:
        """Sends a grammar and returns the answer, empty if the process is lost. Raises OSError."""
        own_end, program_end = socket.socketpair()
        with own_end:
            with program_end, _file(grammar.encode()) as file:
                socket.send_fds(self._control, [str(processor_s).encode()], [program_end.fileno(), file])
            own_end.settimeout(LONGEST_WAIT_S)
            answer = bytearray()
            while part := own_end.recv(2**12):
                answer += part
            return bytes(answer)


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    try:
        process.wait(JOIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """Yields the descriptor of an in-memory file with this content, to be passed to another process."""
    descriptor = os.memfd_create("grammar")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _bytes(answer: dict[str, Any], processor_s: int) -> int:
    """Returns the bytes that the answer reports. Raises GrammarError."""
    match answer:
        case {"bytes": int(taken)}:
            return taken
        case {"error": str(reason)}:
            raise GrammarError(reason)
        case {"signal": signal.SIGXCPU}:
            raise GrammarError(f"takes more than {processor_s} s of processor time to compile")
        case {"signal": signal.SIGSEGV | signal.SIGBUS}:
            raise GrammarError("refers to its own parts too deeply: fewer of them in a chain are accepted")
        case _:  # out of memory: the library aborts, or the kernel kills the process
            raise GrammarError(f"takes more than {MEMORY // 2**20} MiB to compile")
