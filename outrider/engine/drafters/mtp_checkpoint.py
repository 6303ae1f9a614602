"""Checkpoint of a target that includes layers for multi-token prediction (MTP).

transformers leaves these layers out of the model, but can build them and map their weights. The names of
their tensors have two forms:

    model.layers.N.*   numbered after the model's N layers: DeepSeek-V3, GLM-4.5 and their successors
    mtp.*              beside the model: Qwen and its successors, of which only the first layer is read

A quantized layer is dequantized to the target's type as it loads.
"""

import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig, local_torch_dtype

from outrider.engine.cache.key_values import LayerShape
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Probe
from outrider.engine.loading.head_checkpoint import TargetShape
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint
from outrider.engine.loading.text_part import served_config
from outrider.engine.parallel.layers import share_out
from outrider.engine.settings import EngineSettings

PASSED = torch.bfloat16  # type of the fake tensors: experts take no other type
# Values per layer if the config has none: full attention, and experts if the model has experts.
SILENT = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
OF_TARGET = {"embed_tokens.weight", "shared_head.weight"}  # tensors that the layer shares with the target
APPENDED = re.compile(r"model\.layers\.(\d+)\.")
UNUSED = re.compile(
    r"mtp\.layers\.[1-9].*"  # layers after the first
    r"|.*\.(embed_tokens|shared_head\.head)\.weight"  # copies of the target's tensors
)


class MtpCheckpoint:
    """Checkpoint of the settings' target. ``load`` reads its MTP layers."""

    def __init__(self, settings: EngineSettings) -> None:
        """
        Raises:
            UnsupportedModelError: it has no MTP layer, or its MTP layer cannot run here.
        """
        self.target = TargetShape.of(settings)
        config = served_config(settings.model)
        self._checkpoint = StoredCheckpoint(config, settings.model)
        self.num_layers, self._names = self._found()
        self._config = config.get_text_config()
        with FakeTensorMode():
            _, model = self._built(PASSED)
            shapes, ranks = self._probed(model), settings.tensor_parallel
            parts = ranks if ranks > 1 and share_out(model.layers, 0, ranks) else 1
        # Shape of the keys and values that each layer caches per token, at each rank.
        self.cache_shapes: tuple[LayerShape, ...] = tuple(
            (heads // parts, key_dim, value_dim) for heads, key_dim, value_dim in shapes
        )
        count = sum(tensor.numel() for tensor in model.layers.state_dict().values())
        self.weight_bytes = count * self.target.dtype.itemsize

    def load(self, target: Target, rank: int, ranks: int) -> Any:
        """Returns a rank's share of the layers, an MtpModel of transformers, in the target's type.

        Raises:
            UnsupportedModelError: a tensor is missing, or has another shape.
        """
        with torch.device("meta"):
            whole, model = self._built(target.dtype)
        self._checkpoint.fetch()
        tensors = {name: tensor[...] for name, tensor in self._checkpoint.tensors() if name in self._names}
        given = LoadStateDictConfig(
            weight_mapping=model.get_weight_conversions(whole),
            dtype=target.dtype,
        )
        found, _ = convert_and_load_state_dict_in_model(model, tensors, given)
        self._check(found)
        if ranks > 1:
            share_out(model.layers, rank, ranks)
        model.embed_tokens = target.model.get_input_embeddings()
        model.shared_head = target.model.get_output_embeddings()
        model.rotary_emb = target.model.get_decoder().rotary_emb
        return model.to(target.device).eval().requires_grad_(False)

    def _found(self) -> tuple[int, set[str]]:
        """Returns the number of layers, and the names of their tensors."""
        first, names = self.target.num_layers, [name for name, _ in self._checkpoint.names()]
        appended = (APPENDED.match(name) for name in names)
        count = len({int(match[1]) for match in appended if match and int(match[1]) >= first})
        prefixes = *(f"model.layers.{first + layer}." for layer in range(count)), "mtp."
        if found := {name for name in names if name.startswith(prefixes) and not UNUSED.fullmatch(name)}:
            return max(count, 1), found
        raise self._refusal(
            f"the checkpoint has no MTP layer: no tensor is named model.layers.{first}.* or mtp.*"
        )

    def _built(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns a model and its MTP layers, without weights."""
        try:
            return built(self._config, dtype, self.num_layers)
        except (AttributeError, ValueError, StopIteration) as error:
            raise self._refusal(f"transformers builds no MTP layer for it: {error}") from error

    def _probed(self, model: Any) -> list[LayerShape]:
        try:
            probe = probed(model, self.target.hidden_size)
        except Exception as error:  # a layer may fail in any way
            raise self._refusal(
                f"its MTP layer does not run on the paged cache: {type(error).__name__}: {error}"
            ) from error
        if probe.needs or [*probe.shapes] != [*range(self.num_layers)]:
            wanted = " and ".join(sorted(probe.needs)) or "no attention of its own"
            raise self._refusal(f"its MTP layer needs {wanted}, which is not served here")
        return [*probe.shapes.values()]

    def _check(self, found: Any) -> None:
        """Raises UnsupportedModelError if tensors are missing, unknown or of a wrong shape.

        found: LoadStateDictInfo of transformers.
        """
        missing = sorted(found.missing_keys - OF_TARGET)
        if missing:
            raise self._refusal(
                f"its MTP layer has no {', '.join(missing[:3])}, as transformers names it: "
                f"there are {', '.join(sorted(self._names)[:3])}"
            )
        for name, given, wanted in sorted(found.mismatched_keys):
            raise self._refusal(f"{name} is {[*given]} and must be {[*wanted]} for this target")
        for name, error in found.conversion_errors.items():
            raise self._refusal(f"{name} cannot be made of what there is: {error}")
        if found.unexpected_keys:
            unknown = sorted(found.unexpected_keys)
            raise self._refusal(f"{', '.join(unknown[:3])} is no part of an MTP layer of this target")

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"drafter='mtp' for model={self.target.name!r}: {reason}")


def built(config: Any, dtype: torch.dtype, count: int = 1) -> tuple[Any, Any]:
    """Returns a model of transformers and its first ``count`` MTP layers, without weights.

    Raises AttributeError, ValueError or StopIteration: transformers builds no such layer.
    """
    config.num_mtp_layers = count
    for name, value in SILENT.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value * count)
    with local_torch_dtype(dtype):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        return whole, MtpModel(whole, count).eval()


def probed(model: Any, hidden_size: int) -> Probe:
    """Returns what a pass of a token through an MtpModel shows of its attention. May raise any exception."""
    probe, token = Probe(), torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        for layer in range(len(model.layers)):
            after(model, torch.zeros(1, 1, hidden_size, dtype=PASSED), token, token, probe, layer)
    return probe


def after(
    model: Any,
    states: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    outrider: Any,
    layer: int = 0,
) -> torch.Tensor:
    """Returns a layer's output states of tokens from their input states: [1, num_tokens, hidden_size].

    Args:
        model: an MtpModel.
        tokens, positions: int64 [1, num_tokens].
        outrider: argument of attention (outrider/engine/forward/attention.py).
        layer: number of the MTP layer.
    """
    embeddings = model.embed_tokens(tokens)
    kind = {"layer_type": model.config.layer_types[layer]} if model.has_per_layer_rope else {}
    rotation = model.rotary_emb(embeddings, position_ids=positions, **kind)
    states = model.layers[layer](embeddings, states, rotation, None, positions, None, outrider=outrider)
    return model.shared_post_norm(states) if model.use_shared_post_norm else states
