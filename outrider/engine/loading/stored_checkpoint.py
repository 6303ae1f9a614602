"""Checkpoint whose weights may be quantized: its linear layers, and the tensors that transformers loads.

The headers of its files list the tensors. A linear layer keeps its weight, or a rank's share of it, in the
stored format. The same holds for the experts of models that outrider/engine/models describes. The weights of
other experts, which are not linear layers in transformers, are dequantized to the model's type at load.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.delta_net import channels_of
from outrider.engine.forward.experts import SingleExperts, clamped_of
from outrider.engine.forward.layer_operations import PlainOperations
from outrider.engine.forward.linear import StoredLinear
from outrider.engine.kernels.stored_weight import StoredWeight, joined_weight
from outrider.engine.loading.download import WANTED
from outrider.engine.loading.stored import ONE_BYTE, Header, headers, local_headers
from outrider.engine.loading.stored_formats import BESIDE, CODES, METHODS, read_weight
from outrider.engine.loading.text_part import OTHER_PARTS, name_in_text
from outrider.engine.models.architecture import Mixture
from outrider.engine.models.registry import mixtures_in
from outrider.engine.parallel.layers import KEYS_AND_VALUES, repeat_heads
from outrider.engine.parallel.plan import ROWWISE, WHOLE, style_of_stored

CONTENTLESS = torch.device("meta")
TYPES = {  # types as safetensors names them
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
PARAMETERS = ("gate_up_proj", "down_proj")  # parameters of transformers' experts
MXFP4_GROUP = 32  # inputs of an output that share a scale
QUANTIZER = "outrider"  # name of our quantizer in transformers


def is_quantized(config: Any) -> bool:
    """Whether the checkpoint's weights are quantized."""
    return getattr(config, "quantization_config", None) is not None


class StoredCheckpoint:
    """Tensors of a checkpoint by their names in the model, or in its text part."""

    def __init__(self, config: Any, name: str) -> None:
        """
        Args:
            config: config of transformers.
            name: local folder or hub id of the checkpoint.

        Raises:
            UnsupportedModelError: the quantization method is not known, or its files hold unknown codes.
            OSError: its headers cannot be read.
        """
        self.name = name
        self._quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
        self._files: dict[Path | None, Any] = {}
        method = self._quantization.get("quant_method")
        if self._quantization and method not in METHODS:
            raise UnsupportedModelError(
                f"model={name!r}: quant_method={method!r} is not served; these are:"
                f" {', '.join(METHODS)}. Give such a checkpoint, or the one it was made from"
            )
        self._use(headers(name))

    def _use(self, found: dict[str, Header]) -> None:
        self._headers = {name_in_text(name): header for name, header in found.items()}
        self._owners: set[str] = set()
        if not self._quantization:
            return
        for tensor, header in self._headers.items():
            ends = [end for end in CODES if tensor.endswith(end) and header.dtype in ("I32", *ONE_BYTE)]
            self._owners |= {tensor.removesuffix(end) for end in ends}
        known = {owner + end for owner in self._owners for end in (*CODES, *BESIDE)}
        for tensor, header in self._headers.items():
            if header.dtype in ONE_BYTE and tensor not in known:
                raise self._refusal(f"{tensor} is stored in {header.dtype}, in a layout that is not known")

    def fetch(self) -> None:
        """Downloads a checkpoint from the hub, unless it is on this machine."""
        if any(header.file is None for header in self._headers.values()):
            self._use(local_headers(Path(snapshot_download(self.name, allow_patterns=WANTED))))

    def layers(self, model: Any) -> dict[str, StoredWeight]:
        """Returns the quantized weights of linear layers and of experts by name, on the meta device.

        The experts of a layer have the names of transformers' parameters, and their weights are concatenated.

        Raises UnsupportedModelError: tensors of a layer are missing, or do not match the config.
        """
        found = self._linear_layers(model)
        for path, mlp, mixture in self._mixtures(model):
            gate_up, down = self._read_experts(path, mlp, mixture, CONTENTLESS)
            found[f"{path}.{mixture.experts}.gate_up_proj"] = gate_up
            found[f"{path}.{mixture.experts}.down_proj"] = down
        return found

    def _linear_layers(self, model: Any) -> dict[str, StoredWeight]:
        found = {}
        for name, module in model.named_modules():
            if type(module) is nn.Linear and name in self._owners:
                found[name] = weight = self._read(name, CONTENTLESS, module.in_features)
                if weight.shape != (wanted := (module.out_features, module.in_features)):
                    raise self._refusal(f"{name} is stored as {weight.shape} and must be {wanted}")
        return found

    def _mixtures(self, model: Any) -> list[tuple[str, Any, Mixture]]:
        """Returns the items of ``mixtures_in`` whose experts are stored quantized."""
        return [found for found in mixtures_in(model) if self._owners.issuperset(_owners_of(*found))]

    def _read_experts(
        self, path: str, mlp: Any, mixture: Mixture, device: torch.device, rank: int = 0, ranks: int = 1
    ) -> tuple[StoredWeight, StoredWeight]:
        """Returns a rank's concatenated weights of a layer's experts: those of gate and up, and of down."""
        experts = getattr(mlp, mixture.experts)
        hidden, width = experts.gate_up_proj.shape[2], experts.down_proj.shape[2]
        if experts.is_transposed:
            hidden, width = experts.gate_up_proj.shape[1], experts.down_proj.shape[1]
        inputs = cycle((hidden, hidden, width))  # not used for files that store all experts together
        owners = _owners_of(path, mlp, mixture)
        read = [self._read(owner, device, of_each) for owner, of_each in zip(owners, inputs, strict=False)]
        own = width // ranks
        if are_together(mixture):  # outputs of gate and up alternate
            gate_up, down = read
            first, own = features_of(width, rank, ranks)
            order = torch.arange(gate_up.shape[0], device=gate_up.codes.device)
            order = order.view(experts.num_experts, -1, 2)[:, first : first + own]
            gate_up = gate_up.outputs_in(order.transpose(1, 2).flatten())
            down = down if ranks == 1 else down.inputs_at(first, own)
        else:
            downs = [share_of(weight, "rowwise", rank, ranks) for weight in read[2::3]]
            gates, ups = (
                [share_of(weight, "colwise", rank, ranks) for weight in read[at::3]] for at in (0, 1)
            )
            gate_up = joined_weight([part for pair in zip(gates, ups, strict=True) for part in pair])
            down = joined_weight(downs)
        wanted = (2 * own * experts.num_experts, hidden), (hidden * experts.num_experts, own)
        if (gate_up.shape, down.shape) != wanted or (own * ranks != width and not are_together(mixture)):
            raise self._refusal(f"experts of {path} are not stored in the sizes that the config says")
        return gate_up, down

    def load(self, config: Any, device: torch.device, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Loads the model; returns it with transformers' loading info.

        Args:
            config: config of the checkpoint.
            device: device of the model's layers.
            options: arguments of from_pretrained; ``dtype`` must be a type of torch.

        Raises:
            UnsupportedModelError: a tensor is missing, or does not match the config.
        """
        self.fetch()
        with CONTENTLESS:
            empty = AutoModelForCausalLM.from_config(config)
        layers, mixtures = self._linear_layers(empty), self._mixtures(empty)
        owners = {*layers, *(owner for mixture in mixtures for owner in _owners_of(*mixture))}
        experts = [f"{path}.{mixture.experts}" for path, _, mixture in mixtures]
        unquantized = copy(empty.config)
        unquantized.quantization_config = None
        model, found = type(empty).from_pretrained(
            None,
            config=unquantized,
            state_dict={
                name: tensor for name, tensor in self.tensors(owners) if not OTHER_PARTS.search(name)
            },
            quantization_config=_Named(QUANTIZER, [*layers, *experts]),
            output_loading_info=True,
            **options,
        )
        if missing := sorted(found["missing_keys"]):
            raise self._refusal(f"{missing[0]} is missing, {len(missing)} such in all")
        model.config.quantization_config = self._quantization
        with suppress(OSError):  # generation_config.json is optional
            model.generation_config = GenerationConfig.from_pretrained(self.name)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if "distributed_config" in options else (0, 1)
        for name, kept in layers.items():
            style = style_of_stored(name, model)
            owner, _, kind = name.rpartition(".")
            part, parts = rank, ranks
            if kind in KEYS_AND_VALUES:
                attention = model.get_submodule(owner)
                copies = max(ranks * attention.head_dim // kept.shape[0], 1)  # ranks that hold the same head
                part, parts = rank // copies, ranks // copies
                if kind == "k_proj":
                    repeat_heads(attention, copies)
            whole = self._read(name, device, kept.shape[1])
            if kind == "in_proj_qkv" and parts > 1:
                weight = whole.outputs_in(channels_of(model.get_submodule(owner), part, parts).to(device))
            else:
                weight = share_of(whole, style, part, parts)
            bias = self._tensor(f"{name}.bias", device)
            if bias is not None:
                bias = bias.to(model.dtype)
                bias = bias if len(bias) == weight.shape[0] else bias.chunk(parts)[part].clone()
            model.set_submodule(name, StoredLinear(weight, bias))
        for path, mlp, mixture in mixtures:
            weights = self._read_experts(path, mlp, mixture, device, rank, ranks)
            name = f"{path}.{mixture.experts}"
            biases = [self._tensor(f"{name}.{of}_bias", device) for of in PARAMETERS]
            if biases[0] is not None and ranks > 1:  # only rank 0 adds the bias of down
                first, own = features_of(biases[0].shape[1] // 2, rank, ranks)
                biases = [biases[0][:, 2 * first : 2 * (first + own)], None if rank else biases[1]]
            made = _experts_of(getattr(mlp, mixture.experts), mixture, weights, biases, model.dtype)
            model.set_submodule(name, made)
        return model, found

    def names(self, layers: Collection[str] = ()) -> Iterator[tuple[str, str | None]]:
        """Yields the names in transformers of the tensors that do not belong to ``layers``.

        Each name comes with the owner of its codes, which are to be dequantized; None: it is not quantized.
        """
        stored = {owner + end for owner in self._owners for end in (*CODES, *BESIDE)}
        stored |= {name + end for name in layers for end in (".bias", "_bias")}
        for name in self._headers.keys() - stored:
            yield name, None
        for owner in self._owners.difference(layers):
            yield owner if f"{owner}_blocks" in self._headers else f"{owner}.weight", owner

    def tensors(self, layers: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
        """Yields the tensors of ``names``; a tensor is read when it is indexed."""
        for name, owner in self.names(layers):
            if owner is None:
                yield name, self._opened(name).get_slice(self._headers[name].name)
            else:
                yield name, _Widened(self._widened, owner)

    def matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yields the pattern's groups and the tensor for each name in which the pattern is found."""
        self.fetch()
        for name in sorted(self._headers):
            if found := pattern.search(name):
                yield found.groups(), self._opened(name).get_tensor(self._headers[name].name)

    def _widened(self, owner: str) -> Tensor:
        """Returns the dequantized weight of an expert, or of a layer's experts in transformers' layout."""
        numbers = self._read(owner, torch.device("cpu"), None).widened()
        blocks = self._headers.get(f"{owner}_blocks")
        return numbers if blocks is None else numbers.view(*blocks.shape[:2], -1).transpose(1, 2)

    def _read(self, owner: str, device: torch.device, inputs: int | None) -> StoredWeight:
        try:
            return read_weight(lambda end: self._tensor(owner + end, device), self._quantization, inputs)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError) as error:  # a RuntimeError comes from shapes that do not fit
            raise self._refusal(f"{owner} cannot be read: {error}") from error

    def _tensor(self, name: str, device: torch.device) -> Tensor | None:
        """Returns a tensor by its name; None: there is none."""
        header = self._headers.get(name)
        if header is None:
            return None
        if device == CONTENTLESS:
            return torch.empty(header.shape, dtype=TYPES[header.dtype], device=device)
        tensor: Tensor = self._opened(name).get_tensor(header.name)
        return tensor.to(device)

    def _opened(self, name: str) -> Any:
        """Returns the opened file of a tensor."""
        file = self._headers[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        return self._files[file]

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"model={self.name!r}: {reason}")


def share_of(weight: StoredWeight, style: str | None, rank: int, ranks: int) -> StoredWeight:
    """Returns a rank's share of a weight.

    style: style of the tensor-parallel plan; None: each rank has all of it.
    """
    if ranks == 1 or style is None or style in WHOLE:
        return weight
    is_of_inputs = style in ROWWISE
    count = weight.shape[is_of_inputs] // ranks
    return (weight.inputs_at if is_of_inputs else weight.outputs_at)(rank * count, count)


def features_of(width: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the first feature of an MXFP4 expert that a rank holds, and the number of its features.

    Groups are not split, so that a kernel reads long spans of codes. Some ranks may hold one group more.
    """
    groups, more = divmod(width // MXFP4_GROUP, ranks)
    return MXFP4_GROUP * (rank * groups + min(rank, more)), MXFP4_GROUP * (groups + (rank < more))


def _owners_of(path: str, mlp: Any, mixture: Mixture) -> list[str]:
    """Returns the owners of the codes of a layer's experts, in the order of ``mixture.files``."""
    layer = path.rpartition(".")[0]
    count = 1 if are_together(mixture) else getattr(mlp, mixture.experts).num_experts
    return [f"{layer}.{name.format(number)}" for number in range(count) for name in mixture.files]


def are_together(mixture: Mixture) -> bool:
    """Whether files store the weights of all experts together."""
    return len(mixture.files) == len(PARAMETERS)


def _experts_of(
    experts: Any,
    mixture: Mixture,
    weights: tuple[StoredWeight, StoredWeight],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> SingleExperts:
    """Returns experts that keep their weights in the stored format.

    Args:
        experts: module of transformers on the meta device.
        weights: concatenated weights of all experts: those of gate and up, and of down.
        biases: [experts, outputs] biases of these two products; gate and up alternate.
    """
    count = experts.num_experts
    gate_up_bias, down_bias = (None if bias is None else bias.to(dtype) for bias in biases)
    if gate_up_bias is not None:
        gate_up_bias = torch.cat([gate_up_bias[:, ::2], gate_up_bias[:, 1::2]], 1)

    def linear(weight: StoredWeight, of_all: Tensor | None, number: int) -> StoredLinear:
        outputs = weight.shape[0] // count
        bias = None if of_all is None else of_all[number].clone()  # a copy, as a view would keep all biases
        return StoredLinear(weight.outputs_at(number * outputs, outputs), bias)

    gate_up, down = weights
    products = [
        (linear(gate_up, gate_up_bias, number), linear(down, down_bias, number)) for number in range(count)
    ]
    return SingleExperts(products, clamped_of(experts, mixture), PlainOperations(), None, 1)


@dataclass(frozen=True)
class _Widened:
    """Weight of experts that is dequantized when transformers reads it, like a slice of a file."""

    read: Callable[[str], Tensor]
    owner: str

    def __getitem__(self, part: Any) -> Tensor:
        return self.read(self.owner)[part]

    def get_shape(self) -> list[int]:
        return [*self.read(self.owner).shape]


@dataclass
class _Named(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantization config for transformers that names the linear layers and experts not to be made."""

    quant_method: str
    layers: list[str]


@register_quantizer(QUANTIZER)
class _Quantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizer for transformers that empties the layers to be replaced, so that they take no memory."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        for name in self.quantization_config.layers:
            layer: Any = model.get_submodule(name)
            if hasattr(layer, "weight"):
                layer.weight = layer.bias = None
            else:  # experts
                model.set_submodule(name, nn.Identity())

    def is_serializable(self) -> bool:
        return False

    is_trainable = False
