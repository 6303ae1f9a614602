"""Composition: settings, placement and the Serve applications ``cluster.app`` and ``cluster.draft``."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imports an application on demand: a command that needs no torch starts in a tenth of a second."""
    if name in ("app", "draft"):
        from cluster import application

        return getattr(application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
