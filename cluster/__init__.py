"""Composition. Serve looks here for what import paths name: ``cluster.app``, ``cluster.draft``."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a command that needs no torch starts in a tenth of a second."""
    if name in ("app", "draft"):
        from cluster import application

        return getattr(application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
