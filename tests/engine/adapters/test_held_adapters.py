"""Adapters that come and go while an engine serves: never in the middle of a sequence that has one."""

from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import NONE_ASKED, AskedAdapter, Decoded, plain_decoding
from tests.support.adapters import write_adapter
from tests.support.allocated import allocated_weights
from tests.support.checkpoints import write_checkpoint
from tests.support.functions import needs_functions

PROMPT = (5, 9, 33, 5, 9, 33, 5, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three adapters with other weights each."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        write_adapter(folder / name, model, seed)
    return folder


def engine_of(model: Path, **fields: Any) -> Engine:
    given = {"block_size": 4, "cache_memory": 2**20, "threads": 1, "dtype": "float32", **fields}
    return Engine.from_settings(EngineSettings.model_validate({"model": str(model), **given}))


def loaded(engine: Engine, name: str, path: str | None = None) -> AskedAdapter:
    """Returns the adapter as later sequences ask for it."""
    path = path or name
    return AskedAdapter(name, path, engine.load_adapter(AskedAdapter(name, path)))


def request(adapter: AskedAdapter, number: int = 1) -> OfflineRequest:
    return OfflineRequest(PROMPT, Sampling(max_tokens=24, temperature=0.3, ignore_eos=True), number, adapter)


def text(engine: Engine, adapter: AskedAdapter) -> tuple[int, ...]:
    return generate(engine, None, [request(adapter)], 0)[0].tokens


def begun(engine: Engine, adapter: AskedAdapter) -> EngineSequence:
    """Returns a sequence that asks as ``request``, with work that has not begun."""
    asked = request(adapter)
    sequence = engine.open(len(PROMPT), asked.noise_key, asked.sampling, adapter=adapter)
    engine.submit(plain_decoding(sequence.number, 0, PROMPT, asked.sampling.max_tokens))
    return sequence


def steps(engine: Engine, most: int = 1000) -> tuple[int, ...]:
    """Returns the tokens of so many steps, or of all."""
    tokens: list[int] = []
    while engine.has_work and most:
        most -= 1
        for result in engine.step():
            assert isinstance(result, Decoded)
            tokens += result.verdict.tokens
    return tuple(tokens)


def weights(engine: Engine) -> int:
    runner: Any = engine.runner
    return allocated_weights(runner._forward.model)


@needs_functions
def test_engine_with_a_loaded_adapter_says_what_one_with_it_in_its_settings_says(
    model: Path, folder: Path
) -> None:
    named = engine_of(model, adapters={name: str(folder / name) for name in "ab"})
    engine = engine_of(model, adapter_folder=str(folder))
    plain = text(engine, NONE_ASKED)
    asked = [NONE_ASKED, loaded(engine, "a"), loaded(engine, "b")]
    expected = [text(named, AskedAdapter(adapter.name)) for adapter in asked]
    assert len({*expected}) == len(asked)
    assert [text(engine, adapter) for adapter in asked] == expected
    drafted = generate(engine, IndexDrafter(NgramIndex), [request(adapter) for adapter in asked], 3)
    assert [output.tokens for output in drafted] == expected
    assert plain == expected[0] == text(engine_of(model), NONE_ASKED)


@needs_functions
def test_adapter_dropped_under_a_sequence_stays_until_the_sequence_closes(model: Path, folder: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder))
    without = weights(engine)
    adapter = loaded(engine, "a")
    expected, with_adapter = text(engine, adapter), weights(engine)
    sequence = begun(engine, adapter)
    first = steps(engine, 3)
    engine.drop_adapter(adapter.digest)
    assert weights(engine) == with_adapter > without
    assert first + steps(engine) == expected
    engine.close(sequence)
    assert weights(engine) == without


def test_adapter_loaded_again_while_it_is_dropped_stays(model: Path, folder: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder))
    sequence = begun(engine, loaded(engine, "a"))
    with_adapter = weights(engine)
    engine.drop_adapter(loaded(engine, "a").digest)
    loaded(engine, "a")
    engine.close(sequence)
    assert weights(engine) == with_adapter


def test_another_adapter_under_an_old_name_finds_nothing_in_the_cache(model: Path, folder: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder))

    def fed(adapter: AskedAdapter) -> int:
        """Tokens of the prompt that are computed rather than found."""
        sequence = begun(engine, adapter)
        steps(engine, 1)
        assert engine.last_step is not None
        engine.close(sequence)
        return engine.last_step.tokens

    before = loaded(engine, "x", "a")
    assert fed(before) == len(PROMPT) > fed(before)
    engine.drop_adapter(before.digest)
    after = loaded(engine, "x", "b")
    assert after.digest != before.digest
    assert fed(after) == len(PROMPT) > fed(after)


def test_sequence_at_an_engine_without_its_adapter_loads_it(model: Path, folder: Path) -> None:
    first, second = (engine_of(model, adapter_folder=str(folder)) for _ in range(2))
    adapter = loaded(first, "a")
    assert text(second, adapter) == text(first, adapter) != text(first, NONE_ASKED)


def test_sequence_with_other_files_than_were_loaded_is_refused(model: Path, folder: Path) -> None:
    first, second = (engine_of(model, adapter_folder=str(folder)) for _ in range(2))
    digest = loaded(first, "a").digest
    with pytest.raises(UnsupportedModelError, match=r"adapters\.x='b': its files are not those"):
        text(second, AskedAdapter("x", "b", digest))


def test_full_engine_drops_the_adapter_that_is_idle_for_longest(model: Path, folder: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder), max_loaded_adapters=2)
    a, b = loaded(engine, "a"), loaded(engine, "b")
    two = weights(engine)
    used, _ = begun(engine, a), loaded(engine, "c")
    assert weights(engine) == two
    other = begun(engine, b)  # in place of c
    with pytest.raises(
        UnsupportedModelError, match=r"all target\.max_loaded_adapters=2 have sequences under"
    ):
        loaded(engine, "c")
    engine.close(used)
    engine.close(other)
    loaded(engine, "c")
    assert weights(engine) == two


def test_refused_adapter_leaves_the_engine_as_it_was(model: Path, folder: Path, tmp_path: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder))
    adapter = loaded(engine, "a")
    expected, before = text(engine, adapter), weights(engine)
    deep = write_checkpoint(tmp_path / "deep", "llama", num_hidden_layers=4)
    write_adapter(folder / "deep", deep, 1)
    with pytest.raises(UnsupportedModelError, match=r"model.layers.3.* which LlamaForCausalLM does not have"):
        loaded(engine, "deep")
    assert text(engine, adapter) == expected
    assert weights(engine) == before


@pytest.mark.parametrize("way", ["up", "absolute", "folder link", "file link"])
def test_adapter_outside_of_the_folder_is_refused(model: Path, tmp_path: Path, way: str) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    write_adapter(outside, model, 1)
    write_adapter(inside / "here", model, 2)
    path = {"up": "../outside", "absolute": str(outside), "folder link": "link", "file link": "here"}[way]
    (inside / "link").symlink_to(outside)
    if way == "file link":
        (inside / "here" / "adapter_model.safetensors").unlink()
        (inside / "here" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    engine = engine_of(model, adapter_folder=str(inside))
    with pytest.raises(
        UnsupportedModelError, match=rf"adapters\.a='{path}': it must lie in target\.adapter_f"
    ):
        loaded(engine, "a", path)


def test_adapter_of_a_folder_that_is_a_link_is_loaded(model: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    engine = engine_of(model, adapter_folder=str(tmp_path / "link"))
    for path in ("a", str(folder / "b"), str(tmp_path / "link" / "c")):
        loaded(engine, "x", path)


def test_adapter_of_too_high_a_rank_is_refused(model: Path, folder: Path) -> None:
    engine = engine_of(model, adapter_folder=str(folder), max_adapter_rank=3)
    with pytest.raises(UnsupportedModelError, match=r"r=4, at most target\.max_adapter_rank=3 is accepted"):
        loaded(engine, "a")


def test_engine_without_a_folder_loads_nothing(model: Path, folder: Path) -> None:
    engine = engine_of(model)
    with pytest.raises(UnsupportedModelError, match=r"target\.adapter_folder is not set"):
        loaded(engine, "a", str(folder / "a"))


def test_plan_counts_as_many_adapters_as_may_be_loaded(model: Path, tmp_path: Path) -> None:
    fields = {"adapter_folder": str(tmp_path), "max_loaded_adapters": 2, "max_adapter_rank": 32}
    engine, without = engine_of(model, **fields), engine_of(model)
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, model, seed, rank=32)
        loaded(engine, name)
    planned = [skeleton(made.settings).weight_bytes() for made in (engine, without)]
    assert planned[0] - planned[1] == weights(engine) - weights(without)
