"""Digests of a model's files, by which receipts identify weights and tokenizers. Torch-free."""

import hashlib
from pathlib import Path

from huggingface_hub import snapshot_download

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "*.safetensors"


def weights_digest(model: str) -> str:
    """Returns the SHA-256 of the output of ``sha256sum config.json *.safetensors`` in the model's folder.

    It reads every byte, which takes minutes for a large model.

    Args:
        model: local checkpoint folder, or hub id that is in the local cache.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    folder = _folder(model)
    weights = sorted(folder.glob(WEIGHTS))
    if not weights:
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS}: a digest is made of weights in that form")
    listed = "".join(f"{_sha256(file)}  {file.name}\n" for file in [folder / CONFIG, *weights])
    return hashlib.sha256(listed.encode()).hexdigest()


def tokenizer_digest(model: str) -> str:
    """Returns the SHA-256 of tokenizer.json. Arguments and errors as for ``weights_digest``."""
    return _sha256(_folder(model) / TOKENIZER)


def _folder(model: str) -> Path:
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
