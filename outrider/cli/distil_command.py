"""``outrider distil outrider.yaml --prompts prompts.jsonl --out fitted``: fits a draft to your prompts."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from outrider.cli.deployment import add_settings, given_settings, run_or_say_why
from workshop.distillation.settings import DistilSettings

if TYPE_CHECKING:
    from cluster.settings import Settings
    from outrider.traffic.kept import Kept


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("distil", help="fit a draft to what its target says to your own prompts")
    add_settings(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        help='lines of {"prompt": "...", "task": "..."}, or messages; the target answers',
    )
    source.add_argument("--kept", type=Path, metavar="FOLDER", help="traffic that gateway.keep has kept")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the checkpoint")
    for name, field in DistilSettings.model_fields.items():
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            nargs="+" if "tuple" in str(field.annotation) else None,
            metavar=name.rpartition("_")[2].upper(),
            help=field.description if default is None else f"{field.description} [{default}]",
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """1, with the reason, where nothing can be fitted."""
    return run_or_say_why(lambda: _distil(options))


def _distil(options: argparse.Namespace) -> None:
    from workshop.distillation.card import NAME, acceptance_table, card
    from workshop.distillation.distil import Distillation

    asked = _asked(options)
    settings = given_settings(options)
    _check_one_process(settings)
    asked = asked.model_copy(update={"draft": _draft(asked, settings)})
    target = settings.changed(target={"drafter": None, "head": None}, drafts={}).target_engine()
    distillation = Distillation(target, asked, options.out, _tell)
    kind = "kept" if options.prompts is None else "prompts"
    source: Path = options.kept if options.prompts is None else options.prompts
    distilled = distillation.run(str(source), lambda: _questions(kind, source, asked, target.model))
    (options.out / NAME).write_text(card(distilled, asked, settings.target.name, kind))
    distillation.finish()
    print(f"{options.out} is fitted. Acceptance on held-out prompts:\n\n{acceptance_table(distilled)}")


def _asked(options: argparse.Namespace) -> DistilSettings:
    """Raises ValueError that names an option with its value."""
    given = {name: value for name, value in vars(options).items() if name in DistilSettings.model_fields}
    try:
        return DistilSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ValueError(f"--{option} {first['input']}: {first['msg']}") from None


def _draft(asked: DistilSettings, settings: "Settings") -> str | None:
    """That the drafter begins with: of several in a deployment the first."""
    from workshop.distillation.distil import HEADS

    if asked.draft is not None or asked.drafter in HEADS:
        return asked.draft
    return next((draft.model for draft in settings.drafts.values()), None)


def _questions(kind: str, source: Path, asked: DistilSettings, target: str) -> "list[Kept]":
    from transformers import AutoTokenizer

    from outrider.traffic.kept import read_kept
    from workshop.advice.answers import read_prompts
    from workshop.distillation.questions import of_prompts

    if kind == "kept":
        return read_kept(source, asked.texts)
    return of_prompts(read_prompts(source, AutoTokenizer.from_pretrained(target)), asked)


def _check_one_process(settings: "Settings") -> None:
    """Raises ValueError."""
    if settings.target.tensor_parallel > 1:
        raise ValueError(
            f"target.tensor_parallel={settings.target.tensor_parallel}: the target answers in one process "
            "here; give 1, on a device that holds it"
        )


def _tell(what: Any) -> None:
    print(f"outrider: {what}", file=sys.stderr, flush=True)
