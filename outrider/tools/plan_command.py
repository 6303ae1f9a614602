"""``outrider plan outrider.yaml target.tensor_parallel=4``: what a deployment takes of its devices, told
without them."""

import argparse
import sys
from collections.abc import Sequence


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="what a deployment takes of its devices, and of their time")
    parser.add_argument(
        "settings",
        nargs="*",
        help="name=value, as `serve run cluster.app` takes them, or a YAML file of them",
    )
    parser.add_argument("--memory", help="of each device of a target: 80GB, 24GiB [as the settings tell]")
    parser.add_argument("--draft-memory", help="of each device of a draft [as --memory]")
    parser.add_argument("--accelerator", help="of a target: H100, L4, ... [as the settings tell]")
    parser.add_argument("--draft-accelerator", help="of a draft [as --accelerator]")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """1, with the reason, where the deployment would be refused."""
    from outrider.engine.errors import (
        EngineError,  # torch and transformers: seconds, that no other command needs
    )

    try:
        _print_plan(options)
    except (ValueError, OSError, EngineError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    return 0


def _print_plan(options: argparse.Namespace) -> None:
    from cluster.arguments import read_settings
    from cluster.devices import gpus_here, memories, parse_bytes
    from cluster.plan import DeploymentPlan
    from cluster.plan_table import draft_table, plan_table, step_table
    from outrider.engine.loading.weights import check_shares

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
    deployment = DeploymentPlan(settings, found)
    accelerators = {"target": _known(options.accelerator, settings.target.accelerator)}
    for name, draft in settings.drafts.items():
        accelerators[f"drafts.{name}"] = _known(options.draft_accelerator, draft.accelerator)
    steps = step_table(deployment, accelerators)
    print(plan_table(deployment), steps, draft_table(deployment), sep="\n\n")
    deployment.check()


def _known(named: str | None, set_to: str | None) -> str | None:
    """An accelerator whose data sheet is known. Raises ValueError where one is named that is not."""
    from outrider.engine.planning.step_costs import ACCELERATORS

    if named is not None and named not in ACCELERATORS:
        raise ValueError(f"accelerator {named!r} is not known: give one of {', '.join(ACCELERATORS)}")
    return named or (set_to if set_to in ACCELERATORS else None)


def _arguments(words: Sequence[str]) -> dict[str, str]:
    named = (word if "=" in word else f"config={word}" for word in words)
    return dict(word.split("=", 1) for word in named)
