"""Text part of a multimodal checkpoint, which is loaded and served without the other parts."""

import re
from collections.abc import Mapping
from copy import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.stored import headers
from outrider.engine.parallel.plan import use_own_plan

# Kinds whose text part transformers would load together with the other parts, or not at all.
KINDS = ("gemma3", "gemma4", "mistral3")
# Beginnings of tensor names in such a checkpoint, and in its text part.
NAMES = {
    r"^(language_model\.model|model\.language_model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
OTHER_PARTS = re.compile(
    r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|patch_merger|audio_tower"
    r"|embed_vision|embed_audio|mtp)\."
)


def served_config(model: str) -> Any:
    """Returns the config of a checkpoint's text part, or of the whole checkpoint if it is all text.

    Raises UnsupportedModelError: transformers does not know such models.
    """
    try:
        whole = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except ValueError as error:
        kind = PreTrainedConfig.get_config_dict(model)[0].get("model_type")
        if kind in CONFIG_MAPPING:
            raise
        raise UnsupportedModelError(
            f"model={model!r}, a {kind}, is of a kind that transformers does not know, and code that comes"
            " with a checkpoint is not run"
        ) from error
    use_own_plan(whole)
    if whole.model_type not in KINDS:
        return whole
    text = copy(whole.get_text_config())
    text.text_part_of, text.architectures = whole.model_type, whole.architectures
    text.dtype = text.dtype or whole.dtype
    text.quantization_config = getattr(whole, "quantization_config", None)
    text.tie_word_embeddings = whole.tie_word_embeddings and not any(
        name.endswith("lm_head.weight") for name in headers(model)
    )
    return text


def is_text_part(config: Any) -> bool:
    """Whether the config describes only the text part of its checkpoint."""
    return hasattr(config, "text_part_of")


def name_in_text(tensor: str) -> str:
    """Returns the name of a checkpoint's tensor in its text part."""
    for pattern, start in NAMES.items():
        tensor = re.sub(pattern, start, tensor)
    return tensor


def check_tensors(model: str, found: Mapping[str, Any]) -> None:
    """Checks that a text part has all of its tensors, and that the rest belongs to other parts.

    found: loading info of from_pretrained.

    Raises:
        UnsupportedModelError: a tensor is missing, or belongs to no known part.
    """
    strays = [name for name in found["unexpected_keys"] if not OTHER_PARTS.search(name)]
    for what, names in (("lacks", found["missing_keys"]), ("has, beside known parts,", strays)):
        if names:
            raise UnsupportedModelError(
                f"model={model!r}: its text part {what} {min(names)}, {len(names)} such in all, so it is not"
                " what its config says"
            )
