"""Headers of a checkpoint's files, and checks that the files hold the weights that the model expects."""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_safetensors_metadata, snapshot_download

from outrider.engine.errors import UnsupportedModelError

OF_MODELOPT = "hf_quant_config.json"  # file of NVIDIA's ModelOpt; config.json may not mention quantization
ONE_BYTE = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")  # types as safetensors names them
LENGTH_BYTES = 8  # first bytes of a safetensors file, which hold the length of its header
SCALES = re.compile(r"[._](scale|scale_inv|scales|qzeros)$")
# Scales of activations and of cached keys and values, which do not change the meaning of weights.
NOT_OF_WEIGHTS = re.compile(r"(^|[._])(input|output|activation|q|k|v|kv)_scale$")


@dataclass(frozen=True)
class Header:
    """Description of a tensor by its file."""

    name: str
    dtype: str  # type as safetensors names it
    shape: tuple[int, ...]
    file: Path | None  # None: the file is not on this machine


def headers(model: str) -> dict[str, Header]:
    """Returns the headers of the tensors of a local folder or a hub id, by name. Raises OSError."""
    folder = Path(model)
    if not folder.is_dir():
        if not constants.HF_HUB_OFFLINE:
            files = get_safetensors_metadata(model).files_metadata.values()
            described = [item for file in files for item in file.tensors.items()]
            return {name: Header(name, told.dtype, tuple(told.shape), None) for name, told in described}
        folder = Path(snapshot_download(model, local_files_only=True))
    return local_headers(folder)


def local_headers(folder: Path) -> dict[str, Header]:
    """Returns the headers of a folder's tensors by name; empty without a folder.

    Raises UnsupportedModelError: a file cannot be read.
    """
    found: dict[str, Header] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as content:
                length = int.from_bytes(content.read(LENGTH_BYTES), "little")
                header: dict[str, Any] = json.loads(content.read(min(length, file.stat().st_size)))
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"{file} cannot be read as tensors: {error}") from error
        header.pop("__metadata__", None)
        found |= {
            name: Header(name, told["dtype"], tuple(told["shape"]), file) for name, told in header.items()
        }
    return found


def check_stored(model: str, config: Any) -> None:
    """Checks the headers of a local folder's files.

    Raises:
        UnsupportedModelError: the checkpoint is quantized, and its config does not say so.
    """
    folder = Path(model)
    if getattr(config, "quantization_config", None) is not None:
        return
    if (folder / OF_MODELOPT).exists():
        raise UnsupportedModelError(
            f"model={model!r}: {OF_MODELOPT} says that its weights are quantized, and config.json has no"
            " quantization_config, so they would be loaded as if they were not; give the checkpoint it was"
            " made from, or one whose config says it"
        )
    for name, header in local_headers(folder).items():
        if header.dtype in ONE_BYTE and name.endswith("weight"):
            raise UnsupportedModelError(
                f"model={model!r}: {name} is stored in {header.dtype}, and config.json has no"
                " quantization_config that says what its numbers mean; give a checkpoint whose config says it"
            )


def check_unexpected(model: str, loaded: Any, unexpected: Collection[str]) -> None:
    """Checks the tensors of the files that the model does not use.

    Raises:
        UnsupportedModelError: such a tensor scales a weight, which was loaded without it.
    """
    modules = {name for name, _ in loaded.named_modules()}
    lost = [
        name
        for name in sorted(unexpected)
        if SCALES.search(name) and not NOT_OF_WEIGHTS.search(name) and _owner(name) in modules
    ]
    if lost:
        raise UnsupportedModelError(
            f"model={model!r} stores {lost[0]}, {len(lost)} such in all, which its layers do not take: their"
            " weights would be read without their scales. Its config says otherwise than its files"
        )


def _owner(tensor: str) -> str:
    """Returns the name of the tensor's module."""
    return tensor.rpartition(".")[0]
