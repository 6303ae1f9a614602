"""Scales of keys and values that a checkpoint has are those by which its narrow cache stores them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.cache.narrow import Scales
from outrider.engine.loading.cache_scales import cache_scales
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> str:
    """Writes a checkpoint that has these tensors beside its weights."""
    write_checkpoint(folder, "llama")
    file = folder / "model.safetensors"
    save_file({**load_file(file), **scales}, file, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    "place", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.attn.{}_scale"]
)
def test_scales_by_any_of_their_names_are_rounded_up_to_powers_of_two(tmp_path: Path, place: str) -> None:
    names = {kind: f"model.layers.1.{place.format(kind)}" for kind in "kv"}
    model = with_scales(tmp_path, {names["k"]: torch.tensor([0.3]), names["v"]: torch.tensor([[2.0, 0.1]])})
    assert cache_scales(model) == {1: Scales(keys=0.5, values=2.0)}


def test_scales_of_a_checkpoint_are_used_by_a_narrow_cache_alone(tmp_path: Path) -> None:
    model = with_scales(tmp_path, {"model.layers.0.self_attn.v_scale": torch.tensor(0.25)})
    for given, found in ({"cache_dtype": "float8_e4m3fn"}, Scales(1.0, 0.25)), ({}, Scales()):
        fields = {"model": model, "cache_memory": 2**20, "threads": 1, **given}
        settings = EngineSettings.model_validate(fields)
        cache = Engine.from_settings(settings)._cache
        assert cache.scales == {0: found, 1: Scales(), 2: Scales()}
