"""Composition: settings, placement and the Serve applications ``cluster.app`` and ``cluster.draft``."""

import os
from typing import Any

CONFIG_FILE = "OUTRIDER_CONFIG"  # environment variable that names the settings of ``cluster.service``


def __getattr__(name: str) -> Any:
    """Imports an application on demand, so that a command without torch starts in a tenth of a second."""
    if name in ("app", "draft"):
        from cluster import application

        return getattr(application, name)
    if name == "service":
        from cluster.application import service

        return service(os.environ.get(CONFIG_FILE))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
