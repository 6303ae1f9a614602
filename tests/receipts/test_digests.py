"""Digests of a model's files: the same as coreutils print, and others once a byte is another."""

import subprocess
from pathlib import Path

import pytest

from outrider.receipts.digests import tokenizer_digest, weights_digest

FILES = {"config.json": b"{}", "model-1.safetensors": b"one", "model-2.safetensors": b"two"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {**FILES, "tokenizer.json": b"[]", "README.md": b"-"}.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sha256sum(command: str, folder: Path) -> str:
    run = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout.split()[0]


def test_digests_are_those_of_sha256sum(folder: Path) -> None:
    assert weights_digest(str(folder)) == sha256sum("sha256sum config.json *.safetensors | sha256sum", folder)
    assert tokenizer_digest(str(folder)) == sha256sum("sha256sum tokenizer.json", folder)


@pytest.mark.parametrize("name", FILES)
def test_weights_digest_changes_with_a_byte_of_a_file(folder: Path, name: str) -> None:
    before = weights_digest(str(folder))
    (folder / name).write_bytes(FILES[name] + b"!")
    assert weights_digest(str(folder)) != before


def test_weights_digest_of_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        weights_digest(str(tmp_path))
