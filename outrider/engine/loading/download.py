"""Downloads checkpoints into a folder that workers share.

``python -m outrider.engine.loading.download --into /weights SOURCE ...`` runs as the init container on
Kubernetes, without torch.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from outrider.engine.errors import IncompleteCheckpointError

WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]  # no duplicates in other formats, no scripts
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LENGTH_BYTES = 8  # a safetensors file has the length of its header, the header as JSON, then the tensors


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for source in options.sources:
        try:
            print(f"{source}: complete in {fetch(source, options.into)}", flush=True)
        except (OSError, ValueError, IncompleteCheckpointError) as error:
            print(f"{source}: {error}", file=sys.stderr)
            return 1
    return 0


def fetch(source: str, into: Path) -> Path:
    """Brings a checkpoint below ``into`` unless it is there, checks it, and returns its folder.

    No reader sees an incomplete folder: it is renamed to its final name after the check. Files of an
    interrupted download are kept for the next attempt.

    Args:
        source: a local checkpoint folder, or a hub id with or without ``@revision``; the access token is
            read from the environment variable HF_TOKEN.
        into: a local folder becomes ``into/<its name>``, a hub id ``into/<owner>/<name>[@revision]``.

    Raises:
        IncompleteCheckpointError: the folder or the download is not a complete checkpoint.
        OSError: the source cannot be reached or the disk cannot be written.
        ValueError: the hub knows no such id.
    """
    local = Path(source)
    final = into / (local.resolve().name if local.is_dir() else source)
    if final.exists():
        check_complete(final)
        return final
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    if local.is_dir():
        shutil.copytree(local, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    else:
        name, _, revision = source.partition("@")
        snapshot_download(name, revision=revision or None, local_dir=partial, allow_patterns=WANTED)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # metadata of the download
    check_complete(partial)
    os.rename(partial, final)
    return final


def check_complete(folder: Path) -> None:
    """Raises IncompleteCheckpointError naming the first file that is missing, truncated or unreadable."""
    _json(folder / "config.json")
    _json(folder / "tokenizer.json")
    index = folder / INDEX
    shards = set(_json(index)["weight_map"].values()) if index.exists() else {SINGLE}
    for shard in sorted(shards):
        _check_length(folder / shard)


def _json(file: Path) -> dict[str, dict[str, str]]:
    try:
        content: dict[str, dict[str, str]] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise IncompleteCheckpointError(f"{file} cannot be read ({error}): {_advice(file)}") from error
    return content


def _check_length(file: Path) -> None:
    """Checks that a safetensors file ends where its header says that the last tensor ends."""
    try:
        with file.open("rb") as content:
            header_bytes = int.from_bytes(content.read(LENGTH_BYTES), "little")
            header = json.loads(content.read(min(header_bytes, file.stat().st_size)))
    except (OSError, ValueError) as error:
        raise IncompleteCheckpointError(f"{file} cannot be read ({error}): {_advice(file)}") from error
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    expected = LENGTH_BYTES + header_bytes + max(ends, default=0)
    if file.stat().st_size != expected:
        raise IncompleteCheckpointError(
            f"{file} has {file.stat().st_size} bytes of {expected}: {_advice(file)}"
        )


def _advice(file: Path) -> str:
    return f"a checkpoint needs it whole, in safetensors; delete {file.parent} to get it again"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.engine.loading.download",
        description="Gets checkpoints, or makes sure that they are there.",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="local folder, or hub id[@revision]")
    parser.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="where they go")
    return parser


if __name__ == "__main__":
    sys.exit(main())
