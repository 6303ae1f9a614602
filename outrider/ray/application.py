"""Application of ``import_path: outrider.ray:build_openai_app``, with the arguments of Ray's own builder."""

import logging
from typing import Any

from ray.serve import Application

from cluster.application import app
from cluster.arguments import together
from outrider.ray.llm_config import BuilderArguments
from outrider.ray.reading import read_arguments, unheeded
from outrider.ray.translation import translated

logger = logging.getLogger(f"ray.serve.{__name__}")


def build_openai_app(arguments: dict[str, Any]) -> Application:
    """Builds the application that ``cluster.app`` builds, from arguments of Ray's ``build_openai_app``.

    Args:
        arguments: Ray's arguments, and settings of Outrider for which ``LLMConfig`` has no field.

    Raises:
        SettingsError: a field is not accepted, or a setting is given twice.
        Everything that ``cluster.app`` raises.
    """
    of_ray = {name: value for name, value in arguments.items() if name in BuilderArguments.model_fields}
    of_outrider = {name: value for name, value in arguments.items() if name not in of_ray}
    builder, config = read_arguments(of_ray)
    for line in (*unheeded(builder), *unheeded(config)):
        logger.warning(line)
    settings = translated(builder, config)
    return app(together([("llm_configs", settings), ("what stands beside llm_configs", of_outrider)]))
