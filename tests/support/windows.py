"""Engines whose windowed layers have a small pool, in which any read of a freed block shows."""

import math

import pytest
import torch

from outrider.engine.cache.windowed_blocks import WindowedBlocks
from outrider.engine.loop import load
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.memory import Pools
from outrider.engine.settings import EngineSettings


def engine_with_pools(settings: EngineSettings, pools: Pools) -> Engine:
    """Returns an engine with these pools. Free blocks of windowed layers are NaN until they are taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "pools_of", lambda *_: pools)
        engine = Engine.from_settings(settings)
    if pools.num_windowed:
        _poison(engine)
    return engine


def windows_of(engine: Engine) -> WindowedBlocks:
    windows = engine._cache.windows
    assert windows is not None
    return windows


def forget_prefixes(engine: Engine) -> None:
    """Frees the blocks of windowed layers that wait for other sequences."""
    pool = windows_of(engine).pool
    for _, digest in [*pool._kept.items()]:
        pool.withdraw(digest)


def _poison(engine: Engine) -> None:
    pool = windows_of(engine).pool
    allocate, step = pool.allocate, engine.step

    def allocate_clean(count: int, after: int | None = None) -> list[int]:
        blocks = allocate(count, after)
        _fill(engine, blocks, 0.0)
        return blocks

    def step_over_poison() -> object:
        _fill(engine, [*pool._free], math.nan)
        return step()

    vars(pool)["allocate"], vars(engine)["step"] = allocate_clean, step_over_poison


def _fill(engine: Engine, blocks: list[int], number: float) -> None:
    size = engine.settings.block_size
    for stored in engine._cache._windowed:
        stored.unflatten(1, (-1, size))[:, torch.tensor(blocks, dtype=torch.int64)] = number
