"""``outrider plan outrider.yaml target.tensor_parallel=4``: what a deployment takes of its devices.

The devices need not be on this machine.
"""

import argparse

from outrider.cli.deployment import add_deployment, check_accelerator, read_deployment, run_command
from outrider.cli.json_output import add_json, print_or_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_deployment(parser)
    parser.add_argument("--accelerator", help="GPU of the target: H100, L4, ... [from the settings]")
    parser.add_argument("--draft-accelerator", help="GPU of the draft [as --accelerator]")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Returns 1, with the reason on stderr, if the deployment would be refused."""
    return run_command(lambda: _print_plan(options))


def _print_plan(options: argparse.Namespace) -> None:
    check_accelerator(options.accelerator)
    check_accelerator(options.draft_accelerator)
    settings, found = read_deployment(options)

    from cluster.plan import DeploymentPlan  # takes seconds, so arguments are checked first
    from cluster.plan_figures import plan_figures
    from cluster.plan_table import draft_table, plan_table, step_table

    deployment = DeploymentPlan(settings, found)
    accelerators = {"target": _known(options.accelerator, settings.target.accelerator)}
    for name, draft in settings.drafts.items():
        accelerators[f"drafts.{name}"] = _known(options.draft_accelerator, draft.accelerator)
    tables = plan_table(deployment), step_table(deployment, accelerators), draft_table(deployment)
    print_or_write("\n\n".join(tables), plan_figures(deployment), options.json)
    deployment.check()


def _known(named: str | None, set_to: str | None) -> str | None:
    """Returns an accelerator whose data sheet is known; None: the data sheet is not known."""
    from outrider.engine.planning.accelerators import ACCELERATORS

    return named or (set_to if set_to in ACCELERATORS else None)
