"""Simulated CUDA graphs without a GPU: a replay computes again, into the same memory."""

from collections.abc import Callable

import pytest

import outrider.engine.forward.graphs
import outrider.engine.loop.forward_pass
import outrider.engine.loop.load
from tests.support.paged_attention import PlainAttention

SIZES = (1, 4, 8, 32)


class Capture:
    """Stub of CudaCapture."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        work()

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def capturing(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Makes engines use a plain attention kernel and capture graphs."""
    capture = Capture()
    load, forward_pass = outrider.engine.loop.load, outrider.engine.loop.forward_pass
    monkeypatch.setattr(load, "find_kernel", lambda *_, block_size, **__: PlainAttention(block_size))
    monkeypatch.setattr(forward_pass, "CudaCapture", lambda: capture)
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", SIZES)
    return capture
