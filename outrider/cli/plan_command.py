"""``outrider plan outrider.yaml target.tensor_parallel=4``: what a deployment takes of its devices, told
without them."""

import argparse

from outrider.cli.deployment import add_arguments, check_accelerator, read_deployment, run_or_say_why


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("plan", help="what a deployment takes of its devices, and of their time")
    add_arguments(parser)
    parser.add_argument("--accelerator", help="of a target: H100, L4, ... [as the settings tell]")
    parser.add_argument("--draft-accelerator", help="of a draft [as --accelerator]")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """1, with the reason, where the deployment would be refused."""
    return run_or_say_why(lambda: _print_plan(options))


def _print_plan(options: argparse.Namespace) -> None:
    from cluster.plan import DeploymentPlan
    from cluster.plan_table import draft_table, plan_table, step_table

    settings, found = read_deployment(options)
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

    check_accelerator(named)
    return named or (set_to if set_to in ACCELERATORS else None)
