"""``outrider distil outrider.yaml --prompts prompts.jsonl --out fitted``: fits a draft to your prompts."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.deployment import (
    add_settings,
    check_one_process,
    given_settings,
    report_progress,
    run_command,
)
from outrider.cli.options import add_options, read_options
from workshop.distillation.settings import DistilSettings

if TYPE_CHECKING:
    from cluster.settings import Settings
    from gateway.recorded_answers import RecordedAnswer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        help='lines of {"prompt": "...", "task": "..."}, or messages; the target answers',
    )
    source.add_argument(
        "--recorded", type=Path, metavar="FOLDER", help="traffic that gateway.record has written"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder of the checkpoint")
    add_options(parser, DistilSettings)


def run(options: argparse.Namespace) -> int:
    """Returns 1, with the reason on stderr, if nothing can be fitted."""
    return run_command(lambda: _distil(options))


def _distil(options: argparse.Namespace) -> None:
    kind = "recorded" if options.prompts is None else "prompts"
    source: Path = options.recorded if options.prompts is None else options.prompts
    source.stat()
    asked = read_options(options, DistilSettings)
    settings = given_settings(options)
    check_one_process(settings)

    from workshop.distillation.card import NAME, acceptance_table, card  # takes seconds, so imported late
    from workshop.distillation.distil import Distillation

    asked = asked.model_copy(update={"draft": _draft(asked, settings)})
    target = settings.changed(target={"drafters": {}}, drafts={}).target_engine()
    distillation = Distillation(target, asked, options.out, report_progress)
    distilled = distillation.run(str(source), lambda: _questions(kind, source, asked, target.model))
    (options.out / NAME).write_text(card(distilled, asked, settings.target.name, kind))
    distillation.finish()
    print(f"{options.out} is fitted. Acceptance on held-out prompts:\n\n{acceptance_table(distilled)}")


def _draft(asked: DistilSettings, settings: "Settings") -> str | None:
    """Returns the checkpoint to begin with: the deployment's first draft unless a draft is named."""
    from workshop.distillation.distil import HEADS

    if asked.draft is not None or asked.drafter in HEADS:
        return asked.draft
    return next((draft.model for draft in settings.drafts.values()), None)


def _questions(kind: str, source: Path, asked: DistilSettings, target: str) -> "list[RecordedAnswer]":
    from transformers import AutoTokenizer

    from gateway.recorded_answers import read_folder
    from workshop.advice.answers import read_prompts
    from workshop.distillation.questions import of_prompts

    if kind == "recorded":
        return read_folder(source, asked.texts)
    return of_prompts(read_prompts(source, AutoTokenizer.from_pretrained(target)), asked)
