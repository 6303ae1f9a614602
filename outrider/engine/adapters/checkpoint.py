"""Checkpoint of a LoRA adapter in PEFT's form: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Linear layers that an adapter may change, by the last part of their names.
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Largest number of projections that are computed as one layer; zeros fill up their joined changes.
JOINED = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "gate_proj": 2, "up_proj": 2}
TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
# Fields of PEFT's config that change what is computed, with the values under which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}
OWN_WEIGHTS = ("pissa", "olora", "corda", "loftq")  # initializations that change the model's own weights


@dataclass(frozen=True)
class LowRank:
    """Low-rank change of a linear layer."""

    shrink: Tensor  # [rank, in_features]
    expand: Tensor  # [out_features, rank], float32, already scaled


class AdapterCheckpoint:
    """Checkpoint of an adapter: a folder or a hub id. The config is read at once, the weights on demand."""

    def __init__(self, name: str, source: str, within: str | None = None) -> None:
        """
        Args:
            name: name under which requests choose it.
            source: folder or hub id.
            within: folder that must contain it after all links are followed, because a request names it;
                None: the settings name it, and it may be anywhere.

        Raises:
            UnsupportedModelError: it cannot be read, or its kind of adapter is not supported.
        """
        self.name, self._source = name, source
        try:
            self._folder = _folder(source) if within is None else self._bounded(Path(within).resolve())
            self._config: dict[str, Any] = json.loads((self._folder / CONFIG).read_bytes())
        except (OSError, ValueError) as error:
            raise self.refusal(f"its {CONFIG} cannot be read: {error}") from error
        if (kind := self._config.get("peft_type")) != "LORA":
            raise self.refusal(f"peft_type={kind!r}, and LORA alone is computed here")
        for field, neutral in NEUTRAL.items():
            if (value := self._config.get(field)) not in neutral:
                raise self.refusal(f"{field}={value!r} is not computed here: {neutral[0]!r} is")
        if str(begun := self._config.get("init_lora_weights")).startswith(OWN_WEIGHTS):
            raise self.refusal(
                f"init_lora_weights={begun!r} has changed the model's own weights: save it with"
                " path_initial_model_for_weight_conversion"
            )
        self._check_tensors()

    @property
    def rank(self) -> int:
        """LoRA rank."""
        return int(self._config["r"])

    @cached_property
    def digest(self) -> bytes:
        """Digest of its files. Cached blocks depend on it, so no adapter reads blocks of other weights."""
        files = [(self._folder / name).read_bytes() for name in (CONFIG, WEIGHTS)]
        return hashlib.blake2b(b"".join(files), digest_size=16).digest()

    @property
    def num_weights(self) -> int:
        """Upper bound on the number of its weights once projections are joined."""
        total = 0
        for name, shape in self._shapes.items():
            parts = TENSOR.fullmatch(name)
            assert parts is not None
            total += math.prod(shape) * (joined_with(parts["layer"]) if parts["part"] == "B" else 1)
        return total

    def changes(self) -> dict[str, LowRank]:
        """Reads the weights; returns the changes by the names of the layers in transformers' model."""
        tensors = load_file(self._folder / WEIGHTS)
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            parts = TENSOR.fullmatch(name)
            assert parts is not None
            found.setdefault(parts["layer"], {})[parts["part"]] = tensor
        return {
            layer: LowRank(pair["A"], pair["B"].float() * self._scale(len(pair["A"])))
            for layer, pair in found.items()
        }

    def refusal(self, reason: str) -> UnsupportedModelError:
        """Returns the error for an adapter that cannot be used, with the reason."""
        return UnsupportedModelError(f"adapters.{self.name}={self._source!r}: {reason}")

    def _bounded(self, within: Path) -> Path:
        """Returns its folder. Raises UnsupportedModelError if it, or a file of it, lies elsewhere."""
        folder = within / self._source
        for path in (folder, folder / CONFIG, folder / WEIGHTS):
            if not path.resolve().is_relative_to(within):
                raise self.refusal(f"it must lie in target.adapter_folder={str(within)!r}, links followed")
        return folder

    def _scale(self, rank: int) -> float:
        alpha = float(self._config.get("lora_alpha", 8))  # PEFT's default
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    @cached_property
    def _shapes(self) -> Mapping[str, list[int]]:
        try:
            with safe_open(self._folder / WEIGHTS, "pt") as file:
                return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise self.refusal(f"its {WEIGHTS} cannot be read: {error}") from error

    def _check_tensors(self) -> None:
        """Checks names and ranks. Raises UnsupportedModelError."""
        shapes = self._shapes
        if not shapes:
            raise self.refusal(f"its {WEIGHTS} has no tensor")
        for name, shape in shapes.items():
            parts = TENSOR.fullmatch(name)
            if parts is None or not may_change(parts["layer"]):
                raise self.refusal(f"it changes {name}: linear layers {', '.join(ADAPTED)} are changed here")
            other = name.replace(f".lora_{parts['part']}.", f".lora_{'BA'[parts['part'] == 'B']}.")
            rank = shape[0] if parts["part"] == "A" else shape[1]
            if other not in shapes or rank != self._config.get("r"):
                raise self.refusal(f"{name} is {shape}, which does not fit r={self._config.get('r')}")


def may_change(layer: str) -> bool:
    """Whether an adapter may change the layer with that name in transformers' model."""
    return layer.rpartition(".")[2] in ADAPTED and ".experts." not in layer


def joined_with(layer: str) -> int:
    """Returns the largest number of projections that are computed as one layer with this layer."""
    return JOINED.get(layer.rpartition(".")[2], 1)


def _folder(source: str) -> Path:
    folder = Path(source)
    return folder if folder.is_dir() else Path(snapshot_download(source, allow_patterns=[CONFIG, WEIGHTS]))
