"""Checkpoints get into the weights volume whole or not at all."""

import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from outrider.engine.errors import IncompleteCheckpointError
from outrider.engine.loading import download
from outrider.engine.loading.download import INDEX, SINGLE, check_complete, fetch
from tests.support.patience import START_S

DEMO = Path(str(files("outrider.demo").joinpath("pair", "draft")))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "source" / "draft"))


def test_local_folder_is_copied_once(checkpoint: Path, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    folder = fetch(str(checkpoint), volume)
    assert folder == volume / "draft"
    assert (folder / SINGLE).read_bytes() == (DEMO / SINGLE).read_bytes()
    shutil.rmtree(checkpoint / "..", ignore_errors=True)
    checkpoint.mkdir(parents=True)
    assert fetch(str(checkpoint), volume) == folder  # the source is not asked again
    assert [path.name for path in volume.iterdir()] == ["draft"]


@pytest.mark.parametrize(("source", "revision"), [("owner/name", None), ("owner/name@abc", "abc")])
def test_hub_id_is_downloaded_with_its_revision(
    source: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def hub(name: str, **how: object) -> None:
        asked.append((name, how["revision"]))
        shutil.copytree(DEMO, str(how["local_dir"]), dirs_exist_ok=True)

    monkeypatch.setattr(download, "snapshot_download", hub)
    assert fetch(source, tmp_path) == tmp_path / source
    fetch(source, tmp_path)
    assert asked == [("owner/name", revision)]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", SINGLE])
def test_download_that_lacks_a_file_names_it_and_nothing_takes_the_name(
    missing: str, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(IncompleteCheckpointError, match=missing):
        fetch(str(checkpoint), tmp_path / "volume")
    assert not (tmp_path / "volume" / "draft").exists()


def test_interrupted_copy_is_finished_by_the_next_attempt(checkpoint: Path, tmp_path: Path) -> None:
    weights = (checkpoint / SINGLE).read_bytes()
    (checkpoint / SINGLE).write_bytes(weights[:-1])
    with pytest.raises(IncompleteCheckpointError, match=f"{len(weights) - 1} bytes of {len(weights)}"):
        fetch(str(checkpoint), tmp_path / "volume")
    (checkpoint / SINGLE).write_bytes(weights)
    check_complete(fetch(str(checkpoint), tmp_path / "volume"))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, (8).to_bytes(8, "little") + b"no json!"])
def test_copy_that_is_damaged_in_the_volume_is_seen(damage: bytes, checkpoint: Path, tmp_path: Path) -> None:
    folder = fetch(str(checkpoint), tmp_path / "volume")
    (folder / SINGLE).write_bytes(damage)
    with pytest.raises(IncompleteCheckpointError, match=f"{SINGLE}.*delete {folder}"):
        fetch(str(checkpoint), tmp_path / "volume")


def test_every_shard_of_an_index_is_needed(checkpoint: Path) -> None:
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": shards}))
    (checkpoint / SINGLE).rename(checkpoint / shards["a"])
    with pytest.raises(IncompleteCheckpointError, match=shards["b"]):
        check_complete(checkpoint)
    shutil.copy(checkpoint / shards["a"], checkpoint / shards["b"])
    check_complete(checkpoint)


def test_command_says_what_is_wrong_and_fails(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download.main([str(checkpoint), "--into", str(tmp_path / "volume")]) == 0
    (tmp_path / "volume" / "draft" / "config.json").unlink()
    assert download.main([str(checkpoint), "--into", str(tmp_path / "volume")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_download_runs_as_the_module_that_the_manifests_name(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "outrider.engine.loading.download",
        str(checkpoint),
        "--into",
        str(tmp_path / "volume"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=START_S)
    check_complete(tmp_path / "volume" / "draft")
