"""What is found out about the models, in a process of its own, before Serve starts."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.arguments import read_settings
from cluster.preflight import Found, Preflight, find
from cluster.settings import Settings
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from outrider.engine.errors import UnsupportedModelError

SMALL = {"target.max_sequences": 4, "drafts.model.max_sequences": 4}


def settings(arguments: Mapping[str, object]) -> Settings:
    return read_settings({"target": "demo-small", **arguments}).with_gpus(0.0)


def test_process_answers_with_the_plan_and_the_bytes_of_the_caches() -> None:
    asked = settings(SMALL)
    with Preflight() as preflight:
        found = preflight.find(asked, here=True, asked={})
    assert found.refusal is None
    assert found.table is not None
    assert "A device with" in found.table
    assert asked.target.cache_memory is None
    target, draft = found.settings.target.cache_memory, found.settings.drafts["model"].cache_memory
    caches = {"model": {"cache_memory": draft}}
    assert found.settings == asked.changed(target={"cache_memory": target}, drafts=caches)
    assert isinstance(target, int)
    assert isinstance(draft, int)
    assert found == find(asked, here=True, asked={})


def test_preflight_writes_the_demo_target_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "SIZES", {"hidden": 1024, "heads": 8, "kv_heads": 4})
    folder = tmp_path.joinpath(*written_out.target().parts[-2:])
    served = settings({}).changed(target={"model": str(folder)}, drafts={})
    assert find(served, here=False, asked={}).refusal is None
    assert (folder / "config.json").exists()


def test_refusal_keeps_its_kind(tmp_path: Path) -> None:
    with Preflight() as preflight:
        found = preflight.find(settings({"target.tensor_parallel": 3}), here=True, asked={})
    assert isinstance(found.refusal, UnsupportedModelError)
    assert "tensor_parallel=3" in str(found.refusal)


def test_preflight_of_a_misfit_reports_it_with_its_plan() -> None:
    found = find(settings({"target.cache_memory": 0.99}), here=True, asked={})
    assert isinstance(found.refusal, ValueError)
    assert "target.cache_memory=" in str(found.refusal)
    assert found.table is not None


def test_preflight_without_a_known_device_plans_nothing() -> None:
    asked = settings({})
    assert find(asked, here=False, asked={}) == Found(asked)


def test_process_that_is_lost_is_no_answer() -> None:
    with Preflight() as preflight:
        preflight._process.kill()
        with pytest.raises(RuntimeError, match="exit status -9"):
            preflight.find(settings({}), here=True, asked={})


def test_process_ends_with_the_context() -> None:
    with pytest.raises(KeyboardInterrupt), Preflight() as preflight:
        raise KeyboardInterrupt
    assert preflight._process.returncode == -9


def test_draft_that_drafts_in_one_pass_is_another_drafter(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DEMO / "draft", draft)
    asked = settings({"drafts.model.model": str(draft), **SMALL})
    assert find(asked, here=True, asked={}).settings.gateway_settings().drafts == {"model": "model"}
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": 7}))
    assert find(asked, here=True, asked={}).settings.gateway_settings().drafts == {"model": "parallel"}
    assert find(asked, here=False, asked={}).settings.gateway_settings().drafts == {"model": "parallel"}
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": 10**6}))
    refusal = find(asked, here=True, asked={}).refusal
    assert isinstance(refusal, UnsupportedModelError)
    assert "pard_token=1000000" in str(refusal)
