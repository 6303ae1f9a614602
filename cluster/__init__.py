"""Composition. ``serve run cluster.app`` looks for the attribute ``app`` here."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a command that needs no torch starts in a tenth of a second."""
    if name == "app":
        from cluster.application import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
