"""``python -m outrider.decoding.grammar_sandbox_main CONTROL VOCABULARY``: compiles grammars, each in a fork.

CONTROL is the descriptor of a socket; each of its messages carries the descriptors of a connection and of a
grammar. VOCABULARY is the descriptor of a file. The process is single-threaded and compiles nothing itself,
so forking it is safe and cheap. It exits when CONTROL closes, and the kernel then kills its forks.
"""

import gc
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress

from llguidance import LLTokenizer

from outrider.decoding.grammar import GrammarError, compiled, token_table
from outrider.decoding.grammar_sandbox import MEMORY, STACK, SandboxVocabulary
from outrider.decoding.parent_process import end_with

NICENESS = 10  # nice value: serving has priority over compiling
MAX_MESSAGE = 16  # bytes; a message is a number of seconds in decimal digits


class Program:
    """Forks for each message, and reports a fork that was killed by a signal."""

    def __init__(self, control: socket.socket, tokens: LLTokenizer) -> None:
        self._control = control
        self._tokens = tokens
        self._running: dict[int, socket.socket] = {}  # connections by process id
        # Not epoll: it would keep reporting a connection that is closed here and still open in a fork.
        self._selector = selectors.PollSelector()
        self._woken, waking = socket.socketpair()
        waking.setblocking(False)
        self._woken.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.detach(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serves until the control socket closes."""
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._take():
                        return
                elif key.fileobj is self._woken:
                    self._woken.recv(2**12)
                else:
                    self._abandon(key.data)
            self._reap()

    def _take(self) -> bool:
        """Receives a grammar and forks for it; returns False if the control socket has closed."""
        message, (*descriptors,), _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2)
        if not message:
            return False
        connection, grammar = socket.socket(fileno=descriptors[0]), descriptors[1]
        program = os.getpid()
        process = os.fork()
        if process == 0:
            end_with(program)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            _compile(grammar, self._tokens, int(message), connection)
        os.close(grammar)
        self._running[process] = connection
        self._selector.register(connection, selectors.EVENT_READ, process)
        return True

    def _abandon(self, process: int) -> None:
        """Kills the fork of a caller that has disconnected or has its answer."""
        self._selector.unregister(self._running[process])
        os.kill(process, signal.SIGKILL)  # the fork is not reaped yet, so its process id was not reused

    def _reap(self) -> None:
        for process in [*self._running]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                continue
            connection = self._running.pop(process)
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            if os.WIFSIGNALED(status):
                _tell(connection, {"signal": os.WTERMSIG(status)})
            connection.close()


def _compile(grammar: int, tokens: LLTokenizer, processor_s: int, connection: socket.socket) -> None:
    """Compiles the grammar, reports the result, and ends this process."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # the library may write parts of a grammar to stderr
    with os.fdopen(grammar, encoding="utf-8") as file:
        text = file.read()
    space, resident = _memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (space + MEMORY, space + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 1))

    def compile_() -> None:
        try:
            compiled(text, tokens)
            answer: dict[str, str | int] = {"bytes": max(_memory()[1] - resident, 0)}
        except GrammarError as error:
            answer = {"error": str(error)}
        except MemoryError:
            os.abort()
        _tell(connection, answer)

    threading.stack_size(STACK)
    thread = threading.Thread(target=compile_)
    thread.start()
    thread.join()
    os._exit(0)


def _tell(connection: socket.socket, answer: dict[str, str | int]) -> None:
    with suppress(OSError):  # the caller may have disconnected
        connection.sendall(json.dumps(answer).encode())


def _memory() -> tuple[int, int]:
    """Returns the address space and the peak resident memory of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    space, most = (int(fields[name].split()[0]) * 2**10 for name in ("VmSize", "VmHWM"))
    return space, most


def main(arguments: list[str]) -> None:
    control, file = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    os.nice(NICENESS)
    with os.fdopen(file, "rb") as content:
        known: SandboxVocabulary = pickle.load(content)
    tokens = token_table(known.tokenizer, known.vocab_size, known.end_token_ids)
    gc.freeze()  # the collector must not write to memory that forks share
    Program(socket.socket(fileno=control), tokens).run()


if __name__ == "__main__":
    main(sys.argv[1:])
