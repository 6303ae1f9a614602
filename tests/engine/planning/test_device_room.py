"""An engine stays within its part of a GPU, on a simulated one."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from outrider.engine.errors import DeviceTooSmallError
from outrider.engine.loop.engine import Engine
from outrider.engine.planning import device_room
from outrider.engine.planning.device_room import DeviceRoom, bound_allocator, within_share
from outrider.engine.planning.memory_plan import RUNTIME_BYTES
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import MEMORY, needs_compiler, simulated_cuda
from tests.support.simulated_cuda.memory import Memory

pytestmark = needs_compiler

GPU = torch.device("cuda", 0)
MIB = 2**20
ROOM = 256 * MIB  # bytes of a small engine in these tests, without the runtime
SHARE = (ROOM + RUNTIME_BYTES["cuda"]) / MEMORY


@pytest.fixture
def cuda() -> Iterator[SimulatedCuda]:
    with simulated_cuda(1) as cuda:
        yield cuda


@pytest.fixture
def memory(cuda: SimulatedCuda) -> Memory:
    return cuda.memory_of(GPU)


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(write_checkpoint(tmp_path, "llama")),
        "device": "cuda",
        "dtype": "float16",
        "max_sequences": 2,
        "prefill_chunk": 16,
        "graphs": False,
        "self_check": False,
    }


def part(share: float) -> EngineSettings:
    return EngineSettings(model="m", device="cuda:0", device_share=share)


def loaded(fields: dict[str, Any], **others: Any) -> Engine:
    return Engine.from_settings(EngineSettings.model_validate({**fields, **others}))


def test_share_bounds_what_torch_allocates(memory: Memory) -> None:
    bound_allocator(part(SHARE))
    assert memory.fraction * MEMORY == pytest.approx(ROOM)
    torch.empty(ROOM - MIB, dtype=torch.uint8, device=GPU)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(ROOM + MIB, dtype=torch.uint8, device=GPU)


def test_memory_beyond_the_share_is_an_error_that_names_the_setting(memory: Memory) -> None:
    bound_allocator(part(SHARE))
    expected = rf"device_share={SHARE:g}, the worker's part of a GPU"
    with pytest.raises(DeviceTooSmallError, match=expected), within_share(part(SHARE)):
        torch.empty(ROOM + MIB, dtype=torch.uint8, device=GPU)


def test_memory_beyond_a_whole_device_stays_torchs_error(memory: Memory) -> None:
    memory.held_by_others = MEMORY - MIB
    with pytest.raises(torch.OutOfMemoryError), within_share(part(1.0)):
        torch.empty(2 * MIB, dtype=torch.uint8, device=GPU)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    ("given", "share", "has_mps", "expected"),
    [
        pytest.param(None, 0.5, False, 0, id="a part without MPS"),
        pytest.param(None, 0.5, True, 12, id="a part with MPS"),
        pytest.param(None, 1.0, False, 12, id="a whole GPU"),
        pytest.param(5, 0.5, False, 5, id="as given"),
    ],
)
def test_draft_prepares_ahead_unless_it_would_slow_others(
    monkeypatch: pytest.MonkeyPatch,
    cuda: SimulatedCuda,
    fields: dict[str, Any],
    given: int | None,
    share: float,
    has_mps: bool,
    expected: int,
) -> None:
    monkeypatch.setattr(device_room, "mps_runs", lambda: has_mps)
    engine = loaded(fields, device_share=share, draft_ahead=given, cache_memory=MIB, is_draft=True)
    assert engine.settings.draft_ahead == expected


def test_draft_on_a_part_of_a_machine_prepares_ahead(fields: dict[str, Any]) -> None:
    on_cpu = {"device": "cpu", "dtype": "float32", "cache_memory": MIB}
    engine = loaded({**fields, **on_cpu}, device_share=0.5, draft_ahead=None)
    assert engine.settings.draft_ahead == 12


def test_whole_device_is_not_bounded(memory: Memory) -> None:
    bound_allocator(part(1.0))
    assert memory.fraction == 1.0


def test_share_below_what_the_runtime_takes_is_refused(memory: Memory) -> None:
    with pytest.raises(DeviceTooSmallError, match=r"device_share=0\.01 is .* give more than 0\.013"):
        bound_allocator(part(0.01))
    assert memory.fraction == 1.0


def test_cache_beyond_the_share_is_refused_and_the_one_named_fits(
    memory: Memory, fields: dict[str, Any]
) -> None:
    bound_allocator(part(SHARE))
    with pytest.raises(DeviceTooSmallError, match=f"cache_memory={320 * MIB} takes") as refused:
        loaded(fields, device_share=SHARE, cache_memory=320 * MIB)
    assert str(MEMORY) in str(refused.value)
    named = re.search(r"cache_memory=(\d+) would fit", str(refused.value))
    assert named is not None
    loaded(fields, device_share=SHARE, cache_memory=int(named[1]))
    assert memory.reserved <= ROOM


def test_weights_beyond_what_others_leave_are_refused(memory: Memory, fields: dict[str, Any]) -> None:
    memory.held_by_others = MEMORY - 1000
    expected = rf"model='.*' has \d+ bytes of weights .* other processes hold {MEMORY - 1000 - 2**30}: "
    with pytest.raises(DeviceTooSmallError, match=expected):
        loaded(fields, cache_memory=MIB)


def test_cache_left_open_takes_what_others_leave(memory: Memory, fields: dict[str, Any]) -> None:
    memory.held_by_others = MEMORY - ROOM
    engine = loaded(fields)
    assert isinstance(engine.settings.cache_memory, int)
    assert ROOM / 2 < engine.settings.cache_memory < ROOM
    assert memory.free >= 0


def test_cache_left_open_is_as_planned_where_others_hold_their_own_share(memory: Memory) -> None:
    memory.held_by_others = MEMORY // 2
    room = DeviceRoom.of(GPU, 0.5)
    assert room.plannable == room.memory


@pytest.mark.slow
def test_nothing_that_was_joined_or_checked_is_kept_from_the_cache(
    memory: Memory, fields: dict[str, Any]
) -> None:
    found = []
    check = DeviceRoom.check_cache

    def checking(*given: Any) -> None:
        found.append((memory.allocated, memory.reserved))
        check(*given)

    with patch.object(DeviceRoom, "check_cache", checking):
        loaded(fields, dtype="float32", cache_memory=MIB, self_check=True)
    [(allocated, reserved)] = found
    assert 0 < allocated == reserved
