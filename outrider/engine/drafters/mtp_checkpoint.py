"""Checkpoint with a layer for multi-token prediction (MTP), as some targets have it.

transformers leaves the layer out of the model. It can build the layer and name its weights, in two forms:

    model.layers.N.*   after a model's N layers: DeepSeek-V3, GLM-4.5 and their successors
    mtp.*              apart from the model: Qwen and its successors

A layer in FP8, as DeepSeek stores it, is dequantized as it loads.
"""

import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig, local_torch_dtype

from outrider.engine.cache.paged_cache import LayerShape
from outrider.engine.drafters.target_drafter import Target
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Probe
from outrider.engine.loading.head_checkpoint import TargetShape
from outrider.engine.parallel.layers import share_out
from outrider.engine.settings import EngineSettings

WANTED = ["*.safetensors", "config.json"]
PASSED = torch.bfloat16  # type of tensors without content: experts take no other type
# Defaults of configs: a single layer, which sees the whole text, with experts if its model has experts.
SILENT = {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
OF_TARGET = {"embed_tokens.weight", "shared_head.weight"}  # tensors that the layer shares
UNUSED = re.compile(
    r"mtp\.layers\.[1-9].*"  # layers after the first
    r"|.*\.(embed_tokens|shared_head\.head)\.weight"  # copies of the target's tensors
    r"|.*\.input_scale"  # scale of inputs that are rounded to FP8
)
SCALES = ("_scale_inv", "_scale")  # ends of names: scales of fp8, and of compressed-tensors
PACKED = (".qweight", ".weight_packed")  # ends of names: weights of fewer bits
USUAL_BLOCK = (128, 128)  # outputs and inputs of a scale, if the config does not say


class MtpCheckpoint:
    """Checkpoint of the settings' target. ``load`` reads its first MTP layer."""

    def __init__(self, settings: EngineSettings) -> None:
        """
        Raises:
            UnsupportedModelError: it has no such layer, or its layer cannot run here.
        """
        self.target = TargetShape.of(settings)
        config = AutoConfig.from_pretrained(settings.model)
        self._quantization: dict[str, Any] = getattr(config, "quantization_config", None) or {}
        self._files = self._find(settings.model)
        if packed := sorted(name for name in self._files if name.endswith(PACKED)):
            raise self._refusal(f"{packed[0]} is packed, and an MTP layer is read in FP8 or unquantized only")
        self._config = config.get_text_config()
        self._config.num_mtp_layers = 1
        for name, value in SILENT.items():
            if getattr(self._config, name, None) is None:
                setattr(self._config, name, value)
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
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted({*self._files.values()}):
            with safe_open(file, framework="pt") as opened:
                tensors |= {
                    name: opened.get_tensor(name) for name in self._files if self._files[name] == file
                }
        tensors = self._dequantized(tensors, target.dtype)
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

    def _find(self, name: str) -> dict[str, Path]:
        """Returns the file of each tensor."""
        folder = Path(name)
        if not folder.is_dir():
            folder = Path(snapshot_download(name, allow_patterns=WANTED))
        count = self.target.num_layers
        prefixes = f"model.layers.{count}.", "mtp."
        files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise self._refusal(f"{file.name} cannot be read as tensors: {error}") from error
            files |= {name: file for name in names if not UNUSED.fullmatch(name)}
        if not files:
            raise self._refusal(
                f"the checkpoint has no MTP layer: no tensor is named {prefixes[0]}* or {prefixes[1]}*"
            )
        return files

    def _dequantized(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns FP8 weights times their scales, and all other weights unchanged."""
        scales = {
            name.removesuffix(suffix): name
            for suffix in SCALES
            for name in tensors
            if name.endswith(f".weight{suffix}")
        }
        return {
            name: self._scaled(name, tensor, tensors.get(scales.get(name, ""))).to(dtype)
            if tensor.dtype.itemsize == 1
            else tensor
            for name, tensor in tensors.items()
            if name not in scales.values()
        }

    def _scaled(self, name: str, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Returns a weight [outputs, inputs] times its scales: one, or one for each output or block."""
        if scales is None:
            raise self._refusal(f"{name} is {weight.dtype}, and there is no scale for it")
        if scales.numel() == 1 or scales.shape == (len(weight), 1):
            return weight.float() * scales.float()
        (outputs, inputs), (height, width) = weight.shape, self._block
        wanted = [-(-outputs // height), -(-inputs // width)]
        if [*scales.shape] != wanted:
            raise self._refusal(
                f"the scales of {name} are {[*scales.shape]} and must be {wanted},"
                f" for blocks of {height} outputs and {width} inputs"
            )
        of_each = scales.float().repeat_interleave(height, 0).repeat_interleave(width, 1)
        return weight.float() * of_each[:outputs, :inputs]

    @property
    def _block(self) -> tuple[int, int]:
        """Returns the number of outputs and of inputs that share a scale."""
        groups = (self._quantization.get("config_groups") or {}).values()
        named = [group["weights"].get("block_structure") for group in groups if group.get("weights")]
        outputs, inputs = next(
            filter(None, [self._quantization.get("weight_block_size"), *named]), USUAL_BLOCK
        )
        return outputs, inputs

    def _built(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Returns a model and its MTP layer, without weights."""
        try:
            with local_torch_dtype(dtype):
                whole = AutoModelForCausalLM.from_config(
                    self._config, dtype=dtype, attn_implementation=ATTENTION
                )
                return whole, MtpModel(whole, 1).eval()
        except (AttributeError, ValueError, StopIteration) as error:
            raise self._refusal(f"transformers builds no MTP layer for it: {error}") from error

    def _probed(self, model: Any) -> LayerShape:
        probe, size = Probe(), self.target.hidden_size
        token = torch.zeros(1, 1, dtype=torch.int64)
        states = torch.zeros(1, 1, size, dtype=PASSED)
        try:
            with torch.inference_mode():
                after(model, states, token, token, probe)
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
                f"there are {', '.join(sorted(self._files)[:3])}"
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
