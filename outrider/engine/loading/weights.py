"""Loads a checkpoint, unmodified, and checks that it can run on the paged cache."""

import logging
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Probe
from outrider.engine.forward.batch_invariant import check_rows_are_apart
from outrider.engine.forward.delta_net import share_delta_nets
from outrider.engine.forward.latent import may_cache_latents, use_latents
from outrider.engine.forward.recurrent_layers import use_recurrent_layers
from outrider.engine.loading.context import fix_rotations
from outrider.engine.loading.kinds import check_kind, check_states, has_states
from outrider.engine.loading.quantized import quantize
from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.stored import check_stored, check_unexpected
from outrider.engine.loading.stored_checkpoint import StoredCheckpoint, is_quantized
from outrider.engine.loading.text_part import NAMES, check_tensors, is_text_part, served_config
from outrider.engine.parallel.layers import use_parallel_layers
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(__name__)

# Tokens by type of device. On a CPU a larger chunk takes as long per token, so that decoding sequences would
# wait longer for no gain. An 8B model on an H100 prefills 32,768 tokens with chunks of 512, 2,048 and 8,192
# in 1.66 s, 1.42 s and 1.39 s (bench/results/gpu.json).
PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}
CACHELESS = ("mlp", "moe")  # kinds of layers that compute each token by itself


def resolve_device(name: str) -> torch.device:
    """Returns the device, a GPU with its number; "auto" is the first GPU, or the CPU without GPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def resolve_prefill_chunk(settings: EngineSettings) -> int:
    """Returns the prompt tokens in a step: those of the settings, or the default of the device."""
    return settings.prefill_chunk or PREFILL_CHUNK[resolve_device(settings.device).type]


def load_model(settings: EngineSettings) -> Any:
    """Returns the checkpoint as a transformers model in evaluation mode, on its device.

    With several devices each process of the process group loads only its share.

    Raises:
        UnsupportedModelError: transformers cannot load it as a decoder, or it cannot be quantized or shared.
    """
    device = resolve_device(settings.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # Triton's kernels and our graphs run on the current device
    try:
        config = served_config(settings.model)
        check_kind(config, settings.model)
        check_states(config, settings)
        options = _loading(config, settings, device)
        check_config(config, settings)
        check_stored(settings.model, config)
        if is_quantized(config):
            model, found = StoredCheckpoint(config, settings.model).load(config, device, **options)
        else:
            if is_text_part(config):
                options["key_mapping"] = NAMES
            model, found = AutoModelForCausalLM.from_pretrained(
                settings.model, config=config, output_loading_info=True, **options
            )
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(
            f"model={settings.model!r} does not load as a decoder-only model: {error}"
        ) from error
    check_unexpected(settings.model, model, found["unexpected_keys"])
    if is_text_part(config):
        check_tensors(settings.model, found)
    fix_rotations(model)
    model = model.eval()
    if settings.tensor_parallel > 1:
        # All later tokens read a recurrent state, so that it must not depend on the batch either.
        use_parallel_layers(model, in_order=settings.batch_invariant or has_states(config))
        share_delta_nets(model)
    if may_cache_latents(model.dtype):
        use_latents(model, ATTENTION)
    if settings.quantization is not None:
        quantize(model, settings.quantization, device)
    if not is_quantized(model.config):
        model = model.to(device)
    return model


def check_config(config: Any, settings: EngineSettings) -> None:
    """Checks the model on the meta device, before any weight is read.

    Raises:
        UnsupportedModelError: the model cannot run on the paged cache, or lacks batch-invariant numerics.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16).eval()
    try:
        attach(model, settings.model)
    except UnsupportedModelError as error:
        if not isinstance(error.__cause__, RuntimeError):  # the meta device may cause a RuntimeError
            raise
    if settings.batch_invariant:
        check_rows_are_apart(model, settings.model)


def type_of(config: Any) -> torch.dtype:
    """Returns the type of a checkpoint's weights by its config; float32 if the config names no type."""
    return config.dtype or config.get_text_config().dtype or torch.float32


def _loading(config: Any, settings: EngineSettings, device: torch.device) -> dict[str, Any]:
    """Returns the arguments of from_pretrained."""
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    options: dict[str, Any] = {"dtype": dtype}
    ranks = settings.tensor_parallel
    if ranks > 1:
        check_shares(settings)
        options["distributed_config"] = DistributedConfig(tp_size=ranks)
    if is_quantized(config):
        options["dtype"] = type_of(config) if dtype == "auto" else dtype
        if ranks == 1:
            options["device_map"] = {"": device}
    return options


def attach(model: Any, name: str) -> Probe:
    """Routes the model's attention through the paged cache; returns the shapes of its layers.

    A model may accept our attention and silently keep its own. So one token is run to see which layers call
    ours.

    Raises:
        UnsupportedModelError: a layer does not call our attention, hides its sliding window, or needs
            something that our attention lacks; or all layers are recurrent.
    """
    kind = type(model).__name__
    if not use_recurrent_layers(model) and not model.is_backend_compatible():
        raise UnsupportedModelError(
            f"model={name!r}: {kind} does not route its attention through AttentionInterface"
        )
    model.set_attn_implementation(ATTENTION)
    config = model.config.get_text_config()
    probe = Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, outrider=probe)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything
        raise UnsupportedModelError(
            f"model={name!r}: {kind} does not run on the paged cache: {type(error).__name__}: {error}"
        ) from error
    if probe.needs:
        needs = " and ".join(sorted(probe.needs))
        raise UnsupportedModelError(
            f"model={name!r}: {kind} needs {needs}, which our attention does not support"
        )
    recurrent = probe.states.keys() if probe.shapes else set()  # the paged cache needs a layer with attention
    layers = {i for i in range(config.num_hidden_layers) if _kind_of(config, i) not in CACHELESS}
    missing = sorted(layers - probe.shapes.keys() - recurrent)
    if missing:
        raise UnsupportedModelError(
            f"model={name!r}: layers {missing} of {kind} keep no keys and values, or hide them"
        )
    blind = [
        i
        for i, window in probe.windows.items()
        if _kind_of(config, i) == "sliding_attention" and window is None
    ]
    if blind:
        raise UnsupportedModelError(
            f"model={name!r}: layers {blind} of {kind} have a sliding window but do not say so"
        )
    return probe


def _kind_of(config: Any, layer: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return kinds[layer] if kinds else None
