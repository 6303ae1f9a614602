"""Models that cannot run on the paged cache are refused at load, with the reason."""

from pathlib import Path

import pytest

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.weights import resolve_prefill_chunk
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint

IGNORE_OUR_ATTENTION = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
}


@pytest.mark.parametrize("kind", IGNORE_OUR_ATTENTION)
def test_model_that_ignores_our_attention_is_refused(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, kind, **IGNORE_OUR_ATTENTION[kind])
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}.*(AttentionInterface|keep no keys)"):
        Engine.from_settings(EngineSettings(model=str(folder), cache_memory=2**22))


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises((UnsupportedModelError, OSError)):
        Engine.from_settings(EngineSettings(model=str(tmp_path), cache_memory=2**22))


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 0), ("dtype", "int8"), ("device", "tpu"), ("max_runing", 3)]
)
def test_wrong_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        EngineSettings.model_validate({"model": "m", field: value})


@pytest.mark.parametrize(
    ("device", "given", "chunk"), [("cpu", None, 512), ("cuda", None, 2048), ("cuda:1", 100, 100)]
)
def test_resolve_prefill_chunk_left_open_is_that_of_the_device(
    device: str, given: int | None, chunk: int
) -> None:
    assert resolve_prefill_chunk(EngineSettings(model="any", device=device, prefill_chunk=given)) == chunk


def test_model_of_recurrent_layers_alone_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5_text", layer_types=["linear_attention"] * 3)
    with pytest.raises(UnsupportedModelError, match=r"layers \[0, 1, 2\] of .* keep no keys and values"):
        Engine.from_settings(EngineSettings(model=str(folder), cache_memory=2**22))
