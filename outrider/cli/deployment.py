"""Arguments of commands about a deployment that need not be running: its settings and its devices."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.cli.service import exit_code
from outrider.demo.written_out import write_out

if TYPE_CHECKING:
    from cluster.settings import Settings


def run_command(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code. A known failure prints its reason to stderr; code 1."""
    from actors.spinning import bound_spinning
    from outrider.engine.errors import EngineError

    bound_spinning(os.environ)  # before torch is imported: its threads would spin on busy cores

    def run() -> int:
        command()
        return 0

    return exit_code(run, (ValueError, OSError, EngineError))


def report_progress(what: str) -> None:
    """Prints the next action to stderr."""
    print(f"outrider: {what}", file=sys.stderr, flush=True)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of a deployment, without its devices."""
    parser.add_argument(
        "settings",
        nargs="*",
        help="name=value, as `serve run cluster.app` takes them, or a YAML file of them",
    )


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Adds the settings of a deployment, and the memory of its devices."""
    add_settings(parser)
    parser.add_argument("--memory", help="memory of each target device: 80GB, 24GiB [from the settings]")
    parser.add_argument("--draft-memory", help="memory of each draft device [as --memory]")


def given_settings(options: argparse.Namespace) -> "Settings":
    """Returns the settings with this machine's GPUs. Writes the demo target out if they serve it.

    Raises:
        ValueError: settings are not accepted.
        OSError: the demo target cannot be written out.
    """
    settings = _read(options.settings)

    from cluster.gpus import gpus_here  # takes seconds, so arguments are checked first

    settings = settings.with_gpus(len(gpus_here()))
    write_out(settings.target.model)
    return settings


def read_deployment(options: argparse.Namespace) -> "tuple[Settings, dict[str, int]]":
    """Returns the settings with the GPUs of each worker, and bytes of each device by group of settings.

    Raises:
        ValueError: settings are not accepted, or a device's memory is not known.
        UnsupportedModelError: the devices cannot share the target.
        OSError: the demo target cannot be written out.
    """
    from cluster.amounts import parse_bytes

    memory = None if options.memory is None else parse_bytes(options.memory)
    draft_memory = None if options.draft_memory is None else parse_bytes(options.draft_memory)
    settings = _read(options.settings)

    from cluster.devices import memories  # takes seconds, so arguments are checked first
    from cluster.gpus import gpus_here
    from outrider.engine.loading.shares import check_shares

    write_out(settings.target.model)
    check_shares(settings.target_engine())
    # --memory implies GPUs, one for each rank and draft, unless the settings differ.
    wanted = settings.target.most_replicas * settings.target.tensor_parallel
    wanted += sum(draft.most_replicas for draft in settings.drafts.values())
    settings = settings.with_gpus(wanted if memory else len(gpus_here()))
    found = memories(settings, memory, draft_memory)
    if found is None:
        raise ValueError("the memory of a device is not known here: give --memory and --draft-memory")
    return settings, found


def check_accelerator(name: str | None) -> None:
    """Raises ValueError if the data sheet of a named accelerator is not known."""
    from outrider.engine.planning.accelerators import ACCELERATORS

    if name is not None and name not in ACCELERATORS:
        raise ValueError(f"accelerator {name!r} is not known: give one of {', '.join(ACCELERATORS)}")


def check_one_process(settings: "Settings") -> None:
    """Raises ValueError if the target is split over several processes."""
    if settings.target.tensor_parallel > 1:
        raise ValueError(
            f"target.tensor_parallel={settings.target.tensor_parallel}: the target answers in one process "
            "here; give 1, on a device that holds it"
        )


def _read(words: Sequence[str]) -> "Settings":
    """Returns the settings that arguments give. Raises ValueError, also if a model's folder is missing."""
    from cluster.arguments import read_settings
    from cluster.model_folders import check_folders

    named = (word if "=" in word else f"config={word}" for word in words)
    settings = read_settings(dict(word.split("=", 1) for word in named))
    check_folders(settings)
    return settings
