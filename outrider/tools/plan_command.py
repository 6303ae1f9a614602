"""``outrider plan outrider.yaml``: what a deployment takes of its devices, told without them."""

import argparse
import sys


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="what a deployment takes of its devices' memory")
    parser.add_argument("config", nargs="?", help="YAML file with the deployment's settings [the demo pair]")
    parser.add_argument("--memory", help="of each device of a target: 80GB, 24GiB [as the settings tell]")
    parser.add_argument("--draft-memory", help="of each device of a draft [as --memory]")
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
    from cluster.devices import gpus_here, memories, parse_bytes
    from cluster.plan import DeploymentPlan
    from cluster.plan_table import draft_table, plan_table
    from cluster.settings import Settings
    from outrider.engine.loading.weights import check_shares

    memory = None if options.memory is None else parse_bytes(options.memory)
    draft_memory = None if options.draft_memory is None else parse_bytes(options.draft_memory)
    settings = Settings(config=options.config).resolved()
    check_shares(settings.target_engine())
    # Who names a device's memory means GPUs, one for each rank and draft, unless the settings say otherwise.
    wanted = settings.most_targets * settings.tensor_parallel + settings.most_drafts
    settings = settings.with_gpus(wanted if memory else len(gpus_here()))
    found = memories(settings, memory, draft_memory)
    if found is None:
        raise ValueError("nothing here tells how much memory a device has: --memory and --draft-memory do")
    deployment = DeploymentPlan(settings, *found)
    print(plan_table(deployment), draft_table(deployment), sep="\n\n")
    deployment.check()
