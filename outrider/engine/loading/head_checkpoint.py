"""Checkpoint of a drafter head in its published formats, and the shape of its target."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.text_part import served_config
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

WANTED = ["*.safetensors", "*.pt", "*.bin", "config.json"]
READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".safetensors": load_file,
    # Only tensors are unpickled. The file is memory-mapped, so that data is read when a tensor is used.
    ".pt": lambda file: torch.load(file, "cpu", weights_only=True, mmap=True),
    ".bin": lambda file: torch.load(file, "cpu", weights_only=True, mmap=True),
}


@dataclass(frozen=True)
class TargetShape:
    """Shape of the target, which a head must match."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: torch.dtype  # type of its weights as they are loaded

    @classmethod
    def of(cls, settings: EngineSettings) -> "TargetShape":
        """Returns the shape of the settings' target, from its config alone."""
        config = served_config(settings.model)
        text = config.get_text_config()
        stored = config.dtype or text.dtype or torch.float32
        return cls(
            settings.model,
            (config.architectures or [""])[0],
            text.hidden_size,
            text.num_hidden_layers,
            text.vocab_size,
            stored if settings.dtype == "auto" else getattr(torch, settings.dtype),
        )


class HeadCheckpoint:
    """Checkpoint of a head: a local folder or a hub id, with ``config.json`` and weights."""

    def __init__(self, settings: EngineSettings, drafter: str) -> None:
        """
        Args:
            drafter: name of the target drafter whose checkpoint it is.

        Raises:
            UnsupportedModelError: no checkpoint is named, it cannot be read, or the target is not known.
        """
        self.name = checkpoint_of(settings, drafter)
        self._setting = f"drafters.{drafter}.checkpoint"
        self.target = TargetShape.of(settings)
        try:
            self._folder = _folder(self.name)
            self.config: dict[str, Any] = json.loads((self._folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise self.refusal(f"its config.json cannot be read: {error}") from error

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Returns the memory-mapped weights by name. Raises UnsupportedModelError."""
        by_suffix = {
            suffix: [file for file in sorted(self._folder.iterdir()) if file.suffix == suffix]
            for suffix in READERS
        }
        suffix = next((suffix for suffix, files in by_suffix.items() if files), None)
        if suffix is None:
            raise self.refusal(f"there is no file of weights, which ends in {', '.join(READERS)}")
        tensors: dict[str, Tensor] = {}
        for file in by_suffix[suffix]:
            try:
                tensors |= READERS[suffix](file)
            except (OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
                raise self.refusal(f"{file.name} cannot be read as tensors: {error}") from error
        return tensors

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of all weights, in the target's type."""
        return sum(tensor.numel() for tensor in self.tensors.values()) * self.target.dtype.itemsize

    def refusal(self, reason: str) -> UnsupportedModelError:
        """Returns the error for a head that cannot be used, with the reason."""
        given = f"{self._setting}={self.name!r}"
        return UnsupportedModelError(f"{given} for model={self.target.name!r}: {reason}")

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises UnsupportedModelError unless a tensor has that name and shape."""
        if name not in self.tensors:
            raise self.refusal(f"it has no {name}")
        found = tuple(self.tensors[name].shape)
        if found != shape:
            raise self.refusal(f"{name} is {list(found)} and must be {list(shape)} for this target")

    def load_into(self, head: nn.Module, tensors: Mapping[str, Tensor], kind: str) -> None:
        """Assigns tensors to a network without weights, in their stored type.

        kind: description of the network, for messages.

        Raises:
            UnsupportedModelError: a tensor is missing, has another shape, or is no part of the network.
        """
        wanted = head.state_dict()
        for name, tensor in wanted.items():
            if name not in tensors:
                raise self.refusal(f"it has no {name}")
            if tensors[name].shape != tensor.shape:
                raise self.refusal(
                    f"{name} is {list(tensors[name].shape)} and must be {list(tensor.shape)} for this target"
                )
        unknown = sorted(tensors.keys() - wanted.keys())
        if unknown:
            raise self.refusal(f"{', '.join(unknown[:3])} is no part of {kind}")
        head.load_state_dict({name: tensors[name] for name in wanted}, assign=True)

    def check_verifier(self, name: str | None, architectures: list[str] = []) -> None:  # noqa: B006
        """Checks that the checkpoint was made for this target. Raises UnsupportedModelError.

        A target from a local folder may have any name: a different name is only logged.
        """
        target = self.target
        if architectures and target.architecture not in architectures:
            raise self.refusal(
                f"it was made for a {' or '.join(architectures)}, and the target is a {target.architecture}"
            )
        if name is None or Path(name).name == Path(target.name).name:
            return
        if not Path(target.name).is_dir():
            raise self.refusal(f"it was made for {name!r}")
        logger.warning(
            "%s=%r was made for %r: check that %r is that target",
            *(self._setting, self.name, name, target.name),
        )


def checkpoint_of(settings: EngineSettings, drafter: str) -> str:
    """Returns the checkpoint of a target drafter. Raises UnsupportedModelError if the settings name none."""
    name = settings.drafters[drafter].checkpoint
    if name is None:
        raise UnsupportedModelError(
            f"drafters.{drafter}.checkpoint is not given: it must name the folder or hub id of the checkpoint"
        )
    return name


def _folder(name: str) -> Path:
    folder = Path(name)
    return folder if folder.is_dir() else Path(snapshot_download(name, allow_patterns=WANTED))
