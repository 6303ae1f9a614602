"""Ray's ``LLMConfig``, served by Outrider: ``serve run outrider.ray:build_openai_app``."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports the builder on demand: it imports Serve, which the fields do not need."""
    if name == "build_openai_app":
        from outrider.ray.application import build_openai_app

        return build_openai_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
