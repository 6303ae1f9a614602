"""Checks before heavy imports that the model folders in the settings exist."""

from collections.abc import Iterator
from pathlib import Path

from cluster.settings import Settings

BEGINNINGS = ("/", "./", "../", "~")  # prefixes of paths, which no hub id has


def check_folders(settings: Settings) -> None:
    """Raises ValueError, naming the setting, if a folder is missing: it would be taken for a hub id."""
    for name, model in _models(settings):
        is_path = model.startswith(BEGINNINGS) or model.count("/") > 1
        if is_path and not Path(model).is_dir():
            hint = "; ~ is not read here, so write the folder out" if model.startswith("~") else ""
            raise ValueError(f"{name}={model!r}: there is no such folder{hint}")


def _models(settings: Settings) -> Iterator[tuple[str, str]]:
    if not settings.has_written_out_demo:  # it may be written out later
        yield "target.model", settings.target.model
        for name, drafter in settings.target.drafters.items():
            if drafter.checkpoint is not None:
                yield f"target.drafters.{name}.checkpoint", drafter.checkpoint
    for name, draft in settings.drafts.items():
        yield f"drafts.{name}.model", draft.model
