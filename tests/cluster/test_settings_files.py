"""Settings as arguments and files give them."""

from pathlib import Path

import pytest

from cluster.arguments import read_settings
from tests.support.settings_files import in_a_file, settings


def test_file_holds_groups(tmp_path: Path) -> None:
    text = """
    target:
      model: t
      tensor_parallel: 4
      resources: {big: 1}
    drafts:
      model: {model: d, quantization: int8}
    gateway: {max_requests: 3}
    pace: {max_depth: 3}
    """
    found = settings(config=in_a_file(tmp_path, text))
    assert (found.target.model, found.target.tensor_parallel) == ("t", 4)
    assert found.target.resources == {"big": 1.0}
    assert (found.drafts["model"].model, found.drafts["model"].quantization) == ("d", "int8")
    assert (found.gateway.max_requests, found.pace.max_depth) == (3, 3)


def test_arguments_are_text_by_path() -> None:
    found = read_settings(
        {
            "target.model": "t",
            "target.batch_invariant": "true",
            "target.gpus": "0.5",
            "target.resources": '{"big": 1, "node:10.0.0.1": 0.1}',
            "drafts.model.model": "d",
            "gateway.max_requests": "64",
            "pace": '{"max_depth": 4}',
            "tls.key": "file.pem",
        }
    )
    assert (found.target.model, found.target.batch_invariant, found.target.gpus) == ("t", True, 0.5)
    assert found.target.resources == {"big": 1.0, "node:10.0.0.1": 0.1}
    assert found.drafts["model"].model == "d"
    assert (found.gateway.max_requests, found.pace.max_depth, found.tls.key) == (64, 4, "file.pem")


@pytest.mark.parametrize("as_a_file", [False, True], ids=["arguments", "file"])
def test_target_and_draft_have_short_forms(as_a_file: bool, tmp_path: Path) -> None:
    file = in_a_file(tmp_path, "target: t\ndraft: d\n")
    found = settings(config=file) if as_a_file else settings(target="t", draft="d")
    assert (found.target.model, found.drafts["model"].model) == ("t", "d")


def test_short_form_goes_with_other_settings_of_its_group() -> None:
    found = read_settings({"target": "t", "target.threads": "2", "drafts.model.threads": "3", "draft": "d"})
    assert (found.target.model, found.target.threads) == ("t", 2)
    assert (found.drafts["model"].model, found.drafts["model"].threads) == ("d", 3)


def test_arguments_win_setting_by_setting(tmp_path: Path) -> None:
    text = "target: {model: t, threads: 6, resources: {big: 1}, quantization: int8}\ndraft: d\n"
    arguments = {"target.threads": "2", "target.resources": '{"large": 2}', "target.quantization": "null"}
    found = read_settings({"config": in_a_file(tmp_path, text), "drafts.model.threads": "3", **arguments})
    assert (found.target.model, found.target.threads, found.target.quantization) == ("t", 2, None)
    assert found.target.resources == {"large": 2.0}  # one setting, replaced as a whole
    assert (found.drafts["model"].model, found.drafts["model"].threads) == ("d", 3)


def test_group_of_a_file_may_be_empty(tmp_path: Path) -> None:
    assert settings(config=in_a_file(tmp_path, "target:\ndrafts:\n  model:\n")) == settings()


def test_folder_gives_the_settings_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("target: t\ndraft: d\n")
    (tmp_path / "counts.yaml").write_text("target: {replicas: 6}\ndrafts: {model: {replicas: 5}}\n")
    (tmp_path / "notes.txt").write_text("no settings")
    found = read_settings({"config": str(tmp_path), "target.replicas": "2"})
    assert (found.target.model, found.target.replicas) == ("t", 2)
    assert (found.drafts["model"].model, found.drafts["model"].replicas) == ("d", 5)
