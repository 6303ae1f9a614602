"""Kinds of models that cannot be served, recognized by the config alone, each with its reason."""

from collections.abc import Callable
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.settings import EngineSettings

SPARSE_LAYERS = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}
RECURRENT_LAYERS = {"linear_attention", "hybrid", "mamba", "recurrent", "conv", "short_conv"}
# Kinds whose states are kept beside the cache: by Gated DeltaNet, and by Mamba-2.
DELTA_NETS, MAMBAS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}, {"nemotron_h"}
RECURRENT = {"rwkv", "falcon_h1", "xlstm"}  # kinds whose configs do not list the kinds of their layers
SEVERAL_ATTENTIONS = {"diffllama", "dory", "hrm_text"}
HIDDEN_ATTENTION = {"nemotron"}  # kinds whose layers do not pass on the argument with the cache


def _layers(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return {*kinds}


def _is_sparse(config: Any) -> bool:
    """Whether an indexer chooses which tokens are attended to."""
    return getattr(config, "index_topk", None) is not None or bool(_layers(config) & SPARSE_LAYERS)


def _is_recurrent(config: Any) -> bool:
    """Whether some layer keeps a state in place of keys and values."""
    if config.model_type in DELTA_NETS | MAMBAS:
        return False
    return bool(_layers(config) & RECURRENT_LAYERS) or config.model_type in RECURRENT


# Predicates of the text config, each with the reason for the refusal. The first match gives the reason.
TRAITS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        _is_sparse,
        "attends to tokens that an indexer chooses (sparse attention), for which there is no cache here",
    ),
    (
        _is_recurrent,
        "keeps a recurrent state in some layers, and only those of Gated DeltaNet and of Nemotron-H's Mamba-2"
        " are computed here",
    ),
    (
        lambda config: config.model_type in SEVERAL_ATTENTIONS,
        "has several attentions in a layer, and one for each is cached here",
    ),
    (
        lambda config: config.model_type in HIDDEN_ATTENTION,
        "does not pass the model's extra arguments on to its attention, so attention cannot find the cache",
    ),
)


def check_kind(config: Any, name: str) -> None:
    """Checks that models of this kind can be served.

    Args:
        config: config of transformers.
        name: name of the model, for messages.

    Raises:
        UnsupportedModelError: models of this kind cannot be served, with the reason.
    """
    text = config.get_text_config()
    for has_trait, reason in TRAITS:
        if has_trait(text):
            raise UnsupportedModelError(f"model={name!r}, a {text.model_type}, {reason}")
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    if text is not config:
        raise UnsupportedModelError(
            f"model={name!r}, a {config.model_type}, is made for images or sound beside text, and its text"
            f" part, a {text.model_type}, is not taken out of it; give a checkpoint of the text part alone"
        )
    raise UnsupportedModelError(
        f"model={name!r}, a {config.model_type}, is no decoder-only model of transformers, which alone are"
        " served"
    )


def has_states(config: Any) -> bool:
    """Whether some layers of a model, of a kind that can be served, keep recurrent states."""
    return config.get_text_config().model_type in DELTA_NETS | MAMBAS


def check_states(config: Any, settings: EngineSettings) -> None:
    """Checks that the settings use no feature that a model with recurrent states does not support.

    Raises:
        UnsupportedModelError: the settings use such a feature; the message says what is accepted.
    """
    if not has_states(config):
        return
    refused = (
        (settings.batch_invariant, "batch_invariant=True", "steps that are not cut into passes"),
        (bool(settings.adapters), f"adapters={[*settings.adapters]}", "requests without adapters"),
        (
            settings.adapter_folder is not None,
            f"adapter_folder={settings.adapter_folder!r}",
            "requests without adapters",
        ),
        (settings.is_draft, "as a draft", "to be a target: give another model as the draft"),
        (
            settings.tensor_parallel > 1 and config.get_text_config().model_type in MAMBAS,
            f"tensor_parallel={settings.tensor_parallel}",
            "a single device, since ranks share no Mamba-2 layers",
        ),
    )
    for is_given, what, wanted in refused:
        if is_given:
            raise UnsupportedModelError(
                f"{what}: model={settings.model!r}, a {config.model_type}, keeps recurrent states and needs"
                f" {wanted}"
            )
