"""Benchmarks that are ended leave no service running."""

import contextlib
import signal
import subprocess
import sys
import textwrap

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.patience import LIMIT_S

# The two processes stand for a benchmark, and for another that it starts, with a service.
PROGRAM = """
    import signal, subprocess, sys, time
    from tests.support.running import end_with_this_process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    command = [sys.executable, "-c", sys.argv[1], "", *sys.argv[3:]] if sys.argv[2:] else ["sleep", "1000"]
    started = subprocess.Popen(command, preexec_fn=end_with_this_process)
    print(started.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_end_with_this_process_ends_what_an_ended_benchmark_has_started(number: signal.Signals) -> None:
    program = textwrap.dedent(PROGRAM)
    command = [sys.executable, "-c", program, program, "once more"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as benchmark:
        assert benchmark.stdout is not None
        started = [psutil.Process(int(benchmark.stdout.readline())) for _ in range(2)]
        try:
            benchmark.send_signal(number)
            _, alive = psutil.wait_procs(started, timeout=LIMIT_S)
            assert not alive
        finally:
            for process in [*started, psutil.Process(benchmark.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
