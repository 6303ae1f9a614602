"""The model inside an engine."""

from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.runner import ModelRunner


def model_of(engine: Engine) -> Any:
    """The transformers model of an engine that was made from a checkpoint."""
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner.model
