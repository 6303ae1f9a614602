"""Where the time to the first answer went, told from what the service printed and when."""

import pytest

from bench.start import name_of, phases, worker_phases

LINES = [
    (1.0, "2026-01-01 00:00:00,000 INFO scripts.py:499 -- Running import path: 'cluster.app'."),
    (2.5, "INFO worker.py:1691 -- Using address local set in the environment variable RAY_ADDRESS"),
    (6.0, "INFO worker.py:2038 -- Started a local Ray instance."),
    (7.0, "GB on each device               target         draft"),
    (9.0, 'INFO serve 18984 -- Started Serve in namespace "serve".'),
    (14.5, "(ServeReplica pid=1) default_target x -- target worker: /models/a: b with 1 threads,"
     " 2048 tokens in a sequence; imports 4.10 s, weights 0.50 s, self_check 1.25 s, cache 0.00 s"),
    (14.6, "(ServeReplica pid=2) default_draft-model y -- draft worker: d with 1 threads, 2048 tokens"
     " in a sequence; imports 4.00 s, weights 0.20 s, self_check 0.00 s, cache 0.00 s"),
    (15.0, "A first request:"),
    (15.1, "Started Serve again"),
]  # fmt: skip


def test_each_phase_lasts_from_the_end_of_the_one_before() -> None:
    assert phases(LINES, 15.75) == {
        "imports of the command": 2.5,
        "Ray": 3.5,
        "models looked at": 1.0,
        "Serve": 2.0,
        "workers and gateway": 6.0,
        "first request": 0.75,
    }


def test_a_service_that_never_became_ready_is_named() -> None:
    with pytest.raises(ValueError, match="never printed 'Started Serve'"):
        phases(LINES[:4], 15.75)


def test_workers_tell_their_own_phases() -> None:
    assert worker_phases(LINES) == {
        "target": "imports 4.10 s, weights 0.50 s, self_check 1.25 s, cache 0.00 s",
        "draft": "imports 4.00 s, weights 0.20 s, self_check 0.00 s, cache 0.00 s",
    }


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::ServeReplica:default:target", "", ""], "ServeReplica:default:target"),
        (["/v/bin/python", "/v/bin/serve", "run", "cluster.app"], "serve"),
        (["/v/bin/python3.11", "-u", "/ray/log_monitor.py", "--session-dir=/tmp"], "log_monitor.py"),
        (["/ray/raylet/raylet --raylet_socket_name=/tmp/ray"], "raylet"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_process_is_named_by_what_it_is(command: list[str], name: str) -> None:
    assert name_of(command) == name
