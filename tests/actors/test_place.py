"""Where a process of an engine computes: GPUs that it sees, interfaces, threads, and who has not come."""

import logging
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors import place
from actors.meeting import _await_all
from actors.place import (
    confine,
    cores_here,
    interface_of,
    meet_at,
    place_of,
    told,
    with_threads,
)
from actors.spinning import bound_spinning
from actors.watchdog import Loading, loading
from outrider.engine.errors import NoDeviceError
from outrider.engine.settings import EngineSettings
from tests.support.patience import LIMIT_S, wait_until

NOWHERE = "192.0.2.1"  # an address that documents have, and no machine


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [((), ""), (("3",), "3"), (("GPU-3f2a",), "GPU-3f2a"), (None, "0,1")],
    ids=str,
)
def test_confine_leaves_the_given_gpus_alone(gpus: tuple[str, ...] | None, visible: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0,1"}
    confine(environment, gpus)
    assert environment == {"CUDA_VISIBLE_DEVICES": visible}


def test_confine_removes_what_another_launcher_has_set() -> None:
    environment = {"LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "HOME": "/"}
    confine(environment, ())
    assert environment == {"HOME": "/", "CUDA_VISIBLE_DEVICES": ""}


def test_bound_spinning_of_a_process_lets_its_threads_sleep_soon() -> None:
    environment: dict[str, str] = {}
    bound_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": "5000"}


def test_bound_spinning_leaves_what_the_user_has_named() -> None:
    environment = {"GOMP_SPINCOUNT": "7"}
    bound_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": "7"}


def test_meet_at_names_the_interface_of_the_address() -> None:
    environment: dict[str, str] = {}
    meet_at(environment, "127.0.0.1")
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


def test_meet_at_leaves_what_the_user_has_named() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    meet_at(environment, "127.0.0.1")
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}


def test_meet_at_an_address_of_no_interface_warns_and_leaves_it_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment: dict[str, str] = {}
    with caplog.at_level(logging.WARNING, "ray.serve"):
        meet_at(environment, NOWHERE)
    assert environment == {}
    assert f"address {NOWHERE}: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in caplog.text


@pytest.mark.parametrize("address", [NOWHERE, "2001:db8::1", "a-name"])
def test_interface_of_an_address_that_no_interface_has_is_none(address: str) -> None:
    assert interface_of(address) is None


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_cores_here_are_those_that_the_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(place, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert cores_here() == cores


@pytest.mark.parametrize(
    ("given", "sharing", "threads"), [(None, 1, 8), (None, 4, 2), (None, 16, 1), (3, 4, 3)]
)
def test_with_threads_shares_the_cores_of_this_node(
    monkeypatch: pytest.MonkeyPatch, given: int | None, sharing: int, threads: int
) -> None:
    monkeypatch.setattr(place, "cores_here", lambda: 9)
    settings = EngineSettings(model="m", threads=given)
    assert with_threads(settings, sharing).threads == threads


def test_place_of_an_engine_on_the_cpu_has_its_share_of_the_memory() -> None:
    found = place_of(EngineSettings(model="m", device="cpu", device_share=0.25, threads=2), 1)
    assert (found.rank, found.device, found.threads, found.interface) == (1, "cpu", 2, None)
    assert found.may_take == found.memory // 4
    assert "rank 1 takes cpu with" in told(found)


def test_place_of_an_engine_that_was_given_a_gpu_which_torch_does_not_see_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(NoDeviceError, match=r"CUDA_VISIBLE_DEVICES='2': torch .* sees no GPU"):
        place_of(EngineSettings(model="m", device="cuda"), 0)


def test_load_that_waits_for_ranks_names_those_that_have_not_come() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    load = Loading()
    met: list[str] = []
    store.set("outrider/address/0", "10.0.0.1 over eth0")
    store.set("outrider/address/2", "10.0.0.3")
    waiting = threading.Thread(target=lambda: met.append(_await_all(store, 4, load)), daemon=True)
    waiting.start()
    wait_until(lambda: ": 1, 3; there are rank 0 at 10.0.0.1 over eth0, rank 2 at 10.0.0.3" in load.doing)
    assert "these have not come to 127.0.0.1:" in load.doing
    for rank in (1, 3):
        store.set(f"outrider/address/{rank}", "10.0.0.9")
    waiting.join(LIMIT_S)
    assert met == ["rank 0 at 10.0.0.1 over eth0, rank 1 at 10.0.0.9, rank 2 at 10.0.0.3, rank 3 at 10.0.0.9"]


def test_load_that_takes_too_long_says_what_it_was_doing() -> None:
    reasons: list[str] = []
    with loading(0.0, reasons.append):
        wait_until(lambda: bool(reasons))
    assert reasons == ["loading has taken more than load_timeout_s=0"]
    reasons.clear()
    with loading(0.3, reasons.append) as load:
        load.doing = "rank 1 is missing"
        wait_until(lambda: bool(reasons))
    assert reasons == ["loading has taken more than load_timeout_s=0.3: rank 1 is missing"]
