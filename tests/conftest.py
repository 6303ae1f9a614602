import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.fakes.spans import Spans
from tests.support.patience import patient

# Read by torch when it is imported. Models are so small here that threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read by triton when it is imported, which torch's users do early. Without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Read by gRPC when it is imported. Tests start programs while threads of gRPC are at work. Its handlers of
# a fork then end some programs before they begin.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


OF_RANKS = "tests/engine/parallel/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives the tests of ranks to one process: each process that runs some of them starts ten ranks."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda nodeid: OF_RANKS if nodeid.startswith(OF_RANKS) else file_of(nodeid)
    return scheduling


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks a test as slow for each of its parameters after the first, if it is ``slow_beyond_first``."""
    begun = set[str]()
    for item in items:
        if item.get_closest_marker("slow_beyond_first"):
            name = item.nodeid.partition("[")[0]
            if name in begun:
                item.add_marker("slow")
            begun.add(name)


# How long an example takes says more of what else the machine does.
hypothesis.settings.register_profile("outrider", deadline=None)
hypothesis.settings.load_profile("outrider")


@pytest.fixture(autouse=True)
def no_draft_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no request wait for a draft worker, which the gateways of most tests lack."""
    monkeypatch.setattr("gateway.generation.readiness.DRAFTS_WITHIN_S", 0.0)


@pytest.fixture(autouse=True)
def no_peer_is_lost_in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a busy machine from losing a worker, which would change the counts that a test expects."""
    from actors import server  # gRPC is imported here, after its variables above are set
    from gateway.workers import streams

    monkeypatch.setattr(server, "SERVER_OPTIONS", patient(server.SERVER_OPTIONS))
    monkeypatch.setattr(streams, "CHANNEL_OPTIONS", patient(streams.CHANNEL_OPTIONS))


@pytest.fixture
def spans() -> Iterator[Spans]:
    """What is recorded during the test."""
    recorded = Spans()
    recorded.clear()
    yield recorded
    recorded.clear()
