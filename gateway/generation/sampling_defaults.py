"""Sampling defaults that come with the target's checkpoint."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gateway.settings import GatewaySettings
from outrider.decoding.checkpoint_files import read_json
from outrider.decoding.settings import RequestedSampling, Sampling

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # vLLM reads these fields too


def load_sampling_defaults(settings: GatewaySettings) -> dict[str, Any]:
    """Returns the settings of the target's generation_config.json by name.

    Raises:
        ValueError: a value is invalid for sampling; the message names the file and the value.
    """
    if settings.sampling_defaults == "neutral":
        return {}
    config = read_json(settings.tokenizer, FILE)
    given = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if given.get("top_k") == -1:  # other servers' value for keeping all tokens
        given["top_k"] = 0
    try:
        return RequestedSampling.model_validate(given).model_dump(include={*given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = first["loc"][0]
        raise ValueError(
            f"{FILE} of {settings.tokenizer}: {name}={given[str(name)]!r}: {first['msg']};"
            " gateway.sampling_defaults=neutral passes over the file"
        ) from error


def with_defaults(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    """Returns the settings, with defaults for all settings that the request does not name."""
    unnamed = {name: defaults[name] for name in defaults.keys() - sampling.model_fields_set}
    return sampling.model_copy(update=unnamed) if unnamed else sampling
