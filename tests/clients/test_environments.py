"""Environments of clients, of which each needs an index of packages once."""

from pathlib import Path

import pytest

from tests.support import environments

pytestmark = pytest.mark.slow


def test_environment_without_an_index_of_packages_skips_its_test_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens at discard
    with pytest.raises(pytest.skip.Exception, match="packages cannot be fetched: connection broken"):
        environments.environment("absent", "no-such-program==1")
    assert not [*tmp_path.rglob("installed")]


def test_environment_with_a_requirement_that_is_not_there_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="No matching distribution"):
        environments.environment("wrong", "pip==0.0.0.0")
