"""What is found out about the models, in a process of its own, before Serve starts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.arguments import read_settings
from cluster.preflight import Found, Preflight, find
from cluster.settings import Settings
from outrider.engine.errors import UnsupportedModelError

SMALL = {"target.max_sequences": 4, "drafts.default.max_sequences": 4}


def settings(arguments: Mapping[str, object]) -> Settings:
    return read_settings(arguments).with_gpus(0.0)


def test_the_process_answers_with_the_plan_and_the_bytes_of_the_caches() -> None:
    asked = settings(SMALL)
    with Preflight() as preflight:
        found = preflight.find(asked, here=True)
    assert found.refusal is None
    assert found.table is not None
    assert "A device with" in found.table
    assert asked.target.cache_memory is None
    assert found.settings.draft is not None
    target, draft = found.settings.target.cache_memory, found.settings.draft.cache_memory
    assert found.settings == asked.changed(target={"cache_memory": target}, draft={"cache_memory": draft})
    assert isinstance(target, int)
    assert isinstance(draft, int)
    assert found == find(asked, here=True)


def test_a_refusal_keeps_its_kind(tmp_path: Path) -> None:
    with Preflight() as preflight:
        found = preflight.find(settings({"target.tensor_parallel": 3}), here=True)
    assert isinstance(found.refusal, UnsupportedModelError)
    assert "tensor_parallel=3" in str(found.refusal)


def test_what_does_not_fit_is_told_with_its_plan() -> None:
    found = find(settings({"target.cache_memory": 0.95}), here=True)
    assert isinstance(found.refusal, ValueError)
    assert "target.cache_memory=" in str(found.refusal)
    assert found.table is not None


def test_without_a_known_device_nothing_is_planned() -> None:
    asked = settings({})
    assert find(asked, here=False) == Found(asked)


def test_a_process_that_is_lost_is_no_answer() -> None:
    with Preflight() as preflight:
        preflight._process.kill()
        with pytest.raises(RuntimeError, match="exit status -9"):
            preflight.find(settings({}), here=True)


def test_the_process_ends_with_the_context() -> None:
    with pytest.raises(KeyboardInterrupt), Preflight() as preflight:
        raise KeyboardInterrupt
    assert preflight._process.returncode == -9
