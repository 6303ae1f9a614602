"""Checks that a checkpoint's files hold the weights that the model expects."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from outrider.engine.errors import UnsupportedModelError

OF_MODELOPT = "hf_quant_config.json"  # file of NVIDIA's tools, beside a config that may say nothing
FLOATS = ("F8_E4M3", "F8_E5M2")  # one-byte floats as safetensors names them: codes that need a scale
ONE_BYTE = (*FLOATS, "F8_E8M0", "I8", "U8")
LENGTH_BYTES = 8  # bytes before a safetensors file's header, which hold its length
SCALES = re.compile(r"[._](scale|scale_inv|scales|qzeros)$")
# Scales of activations and of cached keys and values, which do not change the meaning of weights.
NOT_OF_WEIGHTS = re.compile(r"(^|[._])(input|output|activation|q|k|v|kv)_scale$")


def check_stored(model: str, config: Any) -> None:
    """Checks the headers of a local folder's files.

    Raises:
        UnsupportedModelError: it is quantized and its config does not say so, or a scale is missing.
    """
    folder = Path(model)
    if getattr(config, "quantization_config", None) is not None:
        _check_scales(model, dict(_stored_types(folder)))
        return
    if (folder / OF_MODELOPT).exists():
        raise UnsupportedModelError(
            f"model={model!r}: {OF_MODELOPT} says that its weights are quantized, and config.json has no"
            " quantization_config, so they would be loaded as if they were not; give the checkpoint it was"
            " made from, or one whose config says it"
        )
    for name, kind in _stored_types(folder):
        if kind in ONE_BYTE and name.endswith("weight"):
            raise UnsupportedModelError(
                f"model={model!r}: {name} is stored in {kind}, and config.json has no quantization_config"
                " that says what its numbers mean; give a checkpoint whose config says it"
            )


def _check_scales(model: str, types: dict[str, str]) -> None:
    scaled = {SCALES.sub("", name) for name in types if SCALES.search(name)}
    for name, kind in types.items():
        if kind in FLOATS and not {name, _owner(name)} & scaled:
            raise UnsupportedModelError(
                f"model={model!r}: {name} is stored in {kind} without a scale, so nothing says what its"
                " numbers mean; give a checkpoint that is complete"
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


def _stored_types(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and type of each tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as content:
            length = int.from_bytes(content.read(LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(content.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, tensor["dtype"]
