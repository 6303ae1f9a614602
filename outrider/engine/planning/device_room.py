"""Memory that an engine may take of a device that it shares with other processes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from outrider.engine.errors import DeviceTooSmallError
from outrider.engine.loading.weights import resolve_device
from outrider.engine.planning.memory import device_memory, free_memory
from outrider.engine.planning.memory_plan import RUNTIME_BYTES, default_cache
from outrider.engine.planning.mps import mps_runs
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

DRAFT_AHEAD = 12  # likely verdicts; further verdicts rarely occur (docs/draft-ahead.md)


def resolve_draft_ahead(settings: EngineSettings, device: torch.device) -> int:
    """Returns the number of verdicts for which a draft prepares: from the settings, or by its device.

    Without MPS, processes that share a GPU take turns on the whole GPU. Drafts that are prepared during the
    target's step would then slow down this step.
    """
    if settings.draft_ahead is not None:
        return settings.draft_ahead
    if device.type == "cuda" and settings.device_share < 1.0 and not mps_runs():
        logger.warning(
            "this draft has a part of a GPU, and NVIDIA's MPS does not run there: draft_ahead is 0, so that"
            " it does not slow the other workers"
        )
        return 0
    return DRAFT_AHEAD


@contextmanager
def within_share(settings: EngineSettings) -> Iterator[None]:
    """Context in which running out of the engine's share of memory raises DeviceTooSmallError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if settings.device_share == 1.0:
            raise
        raise DeviceTooSmallError(
            f"device_share={settings.device_share:g}, the worker's part of a GPU, is too small for what it"
            f" computes: give a larger part (gpus), fewer max_sequences or less cache_memory ({error})"
        ) from error


def bound_allocator(settings: EngineSettings) -> None:
    """Limits torch's allocator to the engine's share of a GPU, minus the memory of the CUDA runtime.

    The process must belong to this engine alone. A whole GPU needs no limit, and a CPU's memory is limited by
    the container.

    Raises:
        DeviceTooSmallError: the runtime alone takes more than the share.
    """
    device, share = resolve_device(settings.device), settings.device_share
    if device.type != "cuda" or share == 1.0:
        return
    memory, runtime = device_memory(device), RUNTIME_BYTES["cuda"]
    room = int(share * memory) - runtime
    if room <= 0:
        raise DeviceTooSmallError(
            f"device_share={share:g} is {int(share * memory)} bytes of {device}, which has {memory}: the "
            f"CUDA runtime takes {runtime}; give more than {runtime / memory:.3f}"
        )
    torch.cuda.set_per_process_memory_fraction(room / memory, device)


@dataclass(frozen=True)
class DeviceRoom:
    """State of a device before an engine is loaded."""

    device: torch.device
    share: float  # part of the device's memory that the engine may take
    memory: int  # bytes of the device, used or not
    held: int  # bytes that other processes hold; 0 on a CPU, which maps memory when it is written

    @classmethod
    def of(cls, device: torch.device, share: float) -> "DeviceRoom":
        memory, held = device_memory(device), 0
        if device.type == "cuda":
            # This process holds a CUDA context already, which the plan counts as runtime.
            held = max(0, memory - free_memory(device) - RUNTIME_BYTES["cuda"])
        return cls(device, share, memory, held)

    @property
    def plannable(self) -> int:
        """Bytes of an imagined empty device whose share is as large as what is left of this device."""
        return min(self.memory, int((self.memory - self.held) / self.share))

    @contextmanager
    def for_weights(self, settings: EngineSettings) -> Iterator[None]:
        """Context for loading weights. Raises DeviceTooSmallError if they do not fit."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            model = skeleton(settings)
            weights = model.weight_bytes(settings.tensor_parallel, settings.quantization)
            raise DeviceTooSmallError(
                f"model={settings.model!r} has {weights} bytes of weights for each of tensor_parallel="
                f"{settings.tensor_parallel} devices, which do not fit into {self._description}: a larger "
                f"device_share or device, more tensor_parallel, or quantization would do ({error})"
            ) from error

    def check_cache(self, settings: EngineSettings, size: int) -> None:
        """Checks that a cache fits into the memory that the loaded weights leave.

        Args:
            settings: settings with ``cache_memory``.
            size: bytes of the cache.

        Raises:
            DeviceTooSmallError: the cache does not fit. The message names a size that fits, if any.
        """
        if self.device.type != "cuda" or size <= (left := self._left()):
            return
        fitting = min(default_cache(skeleton(settings), settings, self.plannable), left)
        advice = (
            f"cache_memory={fitting} would fit" if fitting else "a larger device_share or device would do"
        )
        raise DeviceTooSmallError(
            f"cache_memory={settings.cache_memory} takes {size} bytes, and beside the weights {left} are "
            f"left of {self._description}: {advice}"
        )

    def _left(self) -> int:
        """Returns the bytes that torch may still allocate."""
        limit = int(torch.cuda.get_per_process_memory_fraction(self.device) * self.memory)
        reserved = torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        return min(free_memory(self.device) + reserved, limit) - allocated

    @property
    def _description(self) -> str:
        return (
            f"device_share={self.share:g} of {self.device} with {self.memory} bytes, of which other "
            f"processes hold {self.held}"
        )
