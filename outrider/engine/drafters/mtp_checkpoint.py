"""Checkpoint with a layer for multi-token prediction (MTP), as some targets have it.

transformers leaves the layer out of the model. It can build the layer and name its weights, in two forms:

    model.layers.N.*   after a model's N layers: DeepSeek-V3, GLM-4.5 and their successors
    mtp.*              apart from the model: Qwen and its successors

A quantized layer is widened as it loads.
"""

import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig, local_torch_dtype

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Probe
from outrider.engine.loading.head_checkpoint import TargetShape
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint
from outrider.engine.loading.text_part import served_config
from outrider.engine.parallel.layers import share_out
from outrider.engine.settings import EngineSettings

PASSED = torch.bfloat16  # type of tensors without content: experts take no other type
# Defaults of configs: a single layer, which sees the whole text, with experts if its model has experts.
SILENT = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
OF_TARGET = {"embed_tokens.weight", "shared_head.weight"}  # tensors that the layer shares
UNUSED = re.compile(
    r"mtp\.layers\.[1-9].*"  # layers after the first
    r"|.*\.(embed_tokens|shared_head\.head)\.weight"  # copies of the target's tensors
)


class MtpCheckpoint:
    """Checkpoint of the settings' target. ``load`` reads its first MTP layer."""

    def __init__(self, settings: EngineSettings) -> None:
        """
        Raises:
            UnsupportedModelError: it has no such layer, or its layer cannot run here.
        """
        self.target = TargetShape.of(settings)
        config = served_config(settings.model)
        self._checkpoint = StoredCheckpoint(config, settings.model)
        self._names = self._found()
        self._config = config.get_text_config()
        with FakeTensorMode():
            _, model = self._built(PASSED)
            heads, key_dim, value_dim = self._probed(model)
            ranks = settings.tensor_parallel
            if ranks > 1 and share_out(model.layers, 0, ranks):
                heads //= ranks
        self.cache_shape: LayerShape = heads, key_dim, value_dim  # at each rank
        count = sum(tensor.numel() for tensor in model.layers.state_dict().values())
        self.weight_bytes = count * self.target.dtype.itemsize

    def load(self, target: Target, rank: int, ranks: int) -> Any:
        """Returns a rank's share of the layer, an MtpModel of transformers, in the target's type.

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

    def _found(self) -> set[str]:
        """Returns the names of the layer's tensors."""
        prefixes = f"model.layers.{self.target.num_layers}.", "mtp."
        named = {name for name, _ in self._checkpoint.names() if name.startswith(prefixes)}
        if found := {name for name in named if not UNUSED.fullmatch(name)}:
            return found
        raise self._refusal(
            f"the checkpoint has no MTP layer: no tensor is named {prefixes[0]}* or {prefixes[1]}*"
        )

    def _built(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns a model and its MTP layer, without weights."""
        try:
            return built(self._config, dtype)
        except (AttributeError, ValueError, StopIteration) as error:
            raise self._refusal(f"transformers builds no MTP layer for it: {error}") from error

    def _probed(self, model: Any) -> LayerShape:
        try:
            probe = probed(model, self.target.hidden_size)
        except Exception as error:  # a layer may fail in any way
            raise self._refusal(
                f"its MTP layer does not run on the paged cache: {type(error).__name__}: {error}"
            ) from error
        if probe.needs or [*probe.shapes] != [0]:
            wanted = " and ".join(sorted(probe.needs)) or "no attention of its own"
            raise self._refusal(f"its MTP layer needs {wanted}, which is not served here")
        return probe.shapes[0]

    def _check(self, found: Any) -> None:
        """found: LoadStateDictInfo of transformers."""
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


def built(config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns a model of transformers and its first MTP layer, without weights.

    Raises AttributeError, ValueError or StopIteration: transformers builds no such layer.
    """
    config.num_mtp_layers = 1
    for name, value in SILENT.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    with local_torch_dtype(dtype):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        return whole, MtpModel(whole, 1).eval()


def probed(model: Any, hidden_size: int) -> Probe:
    """Returns what a token through an MtpModel shows of its attention. The layer may fail in any way."""
    probe, token = Probe(), torch.zeros(1, 1, dtype=torch.int64)
    with torch.inference_mode():
        after(model, torch.zeros(1, 1, hidden_size, dtype=PASSED), token, token, probe)
    return probe


def after(
    model: Any, states: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, outrider: Any
) -> torch.Tensor:
    """Returns the states after tokens, from the states before them: [1, num_tokens, hidden_size].

    Args:
        model: an MtpModel.
        tokens, positions: int64 [1, num_tokens].
        outrider: argument of attention (outrider/engine/forward/attention.py).
    """
    embeddings = model.embed_tokens(tokens)
    kind = {"layer_type": model.config.layer_types[0]} if model.has_per_layer_rope else {}
    rotation = model.rotary_emb(embeddings, position_ids=positions, **kind)
    states = model.layers[0](embeddings, states, rotation, None, positions, None, outrider=outrider)
    return model.shared_post_norm(states) if model.use_shared_post_norm else states
