"""The application of ``outrider.ray:build_openai_app`` is Outrider's ordinary one."""

import json
import logging
from pathlib import Path
from types import FunctionType
from typing import Any

import httpx
import pytest
from ray._common.utils import import_attr

from cluster.settings_errors import SettingsError
from outrider.demo.prompts import DEMO
from outrider.ray import application
from tests.support.patience import LIMIT_S
from tests.support.running import free_port, serve_run
from tests.support.served import CACHE

PATH = "outrider.ray:build_openai_app"
CONFIG = {
    "model_loading_config": {"model_id": "demo", "model_source": str(DEMO / "target")},
    "engine_kwargs": {
        "dtype": "float32",
        "kv_cache_memory_bytes": CACHE,
        "gpu_memory_utilization": 0.9,
        "speculative_config": {"model": str(DEMO / "draft"), "num_speculative_tokens": 4},
    },
}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings with which the application is built."""
    settings: dict[str, Any] = {}
    monkeypatch.setattr(application, "app", settings.update)
    return settings


def test_import_path_is_a_builder_of_serve() -> None:
    assert isinstance(import_attr(PATH), FunctionType)


def test_settings_of_outrider_stand_beside_the_config(
    built: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"llm_configs": [CONFIG], "access": {"require_keys": False}, "target.threads": "2"}
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        application.build_openai_app(arguments)
    assert built["access"] == {"require_keys": False}
    assert (built["target"]["name"], built["target"]["threads"]) == ("demo", "2")
    assert [line for line in caplog.messages if "gpu_memory_utilization=0.9 has no meaning here" in line]


def test_setting_that_the_config_has_too_is_refused(built: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"sets target\.name again: give each setting once"):
        application.build_openai_app({"llm_configs": [CONFIG], "target.name": "other"})
    assert built == {}


@pytest.mark.slow
def test_service_of_an_llm_config_answers_under_its_model_id(tmp_path: Path) -> None:
    (tmp_path / "llm.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML
    port = free_port()
    settings = {"addresses.http_port": port, "addresses.grpc_port": free_port(), "target.threads": 1}
    arguments = [PATH, "llm_configs=llm.yaml", *(f"{name}={value}" for name, value in settings.items())]
    body = {"model": "demo", "prompt": '{"name": "', "max_tokens": 8}
    with serve_run(tmp_path, arguments, "local", {}, lambda log: "A first request" in log):
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=LIMIT_S)
        assert (answer.status_code, answer.json()["model"]) == (200, "demo")
    log = (tmp_path / "serve.log").read_text()
    assert log.count("gpu_memory_utilization=0.9 has no meaning here") == 1
