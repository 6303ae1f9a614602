"""The arguments of commands that ask about a deployment which need not run: its settings, its devices."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outrider.cli.generate_command import INTERRUPTED

if TYPE_CHECKING:
    from cluster.settings import Settings


def run_or_say_why(command: Callable[[], None]) -> int:
    """The exit code; 1 where the command cannot do what it should: stderr has the reason."""
    from outrider.engine.errors import (
        EngineError,  # torch and transformers: seconds, that no other command needs
    )

    try:
        command()
    except (ValueError, OSError, EngineError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Without devices."""
    parser.add_argument(
        "settings",
        nargs="*",
        help="name=value, as `serve run cluster.app` takes them, or a YAML file of them",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Settings and devices."""
    add_settings(parser)
    parser.add_argument("--memory", help="of each device of a target: 80GB, 24GiB [as the settings tell]")
    parser.add_argument("--draft-memory", help="of each device of a draft [as --memory]")


def given_settings(options: argparse.Namespace) -> "Settings":
    """On the devices of this machine. Raises ValueError."""
    from cluster.arguments import read_settings
    from cluster.gpus import gpus_here

    return read_settings(_arguments(options.settings)).with_gpus(len(gpus_here()))


def read_deployment(options: argparse.Namespace) -> "tuple[Settings, dict[str, int]]":
    """The settings with the GPUs of each worker, and bytes of each device by group of settings.

    Raises:
        ValueError: they are not accepted, or nothing tells how much memory a device has.
        UnsupportedModelError: the devices cannot share the target.
    """
    from cluster.arguments import read_settings
    from cluster.devices import memories, parse_bytes
    from cluster.gpus import gpus_here
    from outrider.engine.loading.shares import check_shares

    memory = None if options.memory is None else parse_bytes(options.memory)
    draft_memory = None if options.draft_memory is None else parse_bytes(options.draft_memory)
    settings = read_settings(_arguments(options.settings))
    check_shares(settings.target_engine())
    # Who names a device's memory means GPUs, one for each rank and draft, unless the settings say otherwise.
    wanted = settings.target.most_replicas * settings.target.tensor_parallel
    wanted += sum(draft.most_replicas for draft in settings.drafts.values())
    settings = settings.with_gpus(wanted if memory else len(gpus_here()))
    found = memories(settings, memory, draft_memory)
    if found is None:
        raise ValueError("nothing here tells how much memory a device has: --memory and --draft-memory do")
    return settings, found


def check_accelerator(name: str | None) -> None:
    """Raises ValueError where one is named whose data sheet is not known."""
    from outrider.engine.planning.step_costs import ACCELERATORS

    if name is not None and name not in ACCELERATORS:
        raise ValueError(f"accelerator {name!r} is not known: give one of {', '.join(ACCELERATORS)}")


def _arguments(words: Sequence[str]) -> dict[str, str]:
    named = (word if "=" in word else f"config={word}" for word in words)
    return dict(word.split("=", 1) for word in named)
