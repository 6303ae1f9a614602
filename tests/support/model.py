"""The model inside an engine."""

from collections.abc import Callable
from typing import Any

from outrider.engine.forward.batch import Batch
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.runner import ModelRunner


def model_of(engine: Engine) -> Any:
    """Returns the transformers model of an engine that was loaded from a checkpoint."""
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner.model


def forward_of(engine: Engine) -> ForwardPass:
    """Returns the forward pass of an engine that was loaded from a checkpoint."""
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner._forward


def before_passes(engine: Engine, see: Callable[[Batch], None]) -> None:
    """Calls ``see`` before every forward pass; ``see`` may raise."""
    forward = forward_of(engine)
    compute = forward._compute

    def seen(batch: Batch) -> ForwardOutput:
        see(batch)
        return compute(batch)

    forward._compute = seen  # type: ignore[method-assign]
