"""Engines without graphs: a simulated device counts each kernel launch."""

from pathlib import Path
from typing import Any

from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings

ASKED = [OfflineRequest((5, 9, 33), Sampling(max_tokens=6, temperature=0.9), 1)]


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    """Returns the settings of a small model without graphs."""
    given = {"dtype": "float32", "cache_memory": 2**21, "graphs": False, "block_size": 8}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def text(settings: EngineSettings) -> tuple[int, ...]:
    """Returns the tokens that a model with these settings generates."""
    [output] = generate(Engine.from_settings(settings), None, ASKED, 0)
    return output.tokens
