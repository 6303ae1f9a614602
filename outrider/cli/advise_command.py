"""``outrider advise outrider.yaml --prompts prompts.jsonl``: which draft suits a target and its prompts."""

import argparse
from pathlib import Path
from typing import Any

from outrider.cli.deployment import (
    add_deployment,
    check_accelerator,
    check_one_process,
    read_deployment,
    report_progress,
    run_command,
)
from outrider.cli.json_output import add_json, print_or_write
from outrider.cli.options import add_options, read_options
from workshop.advice.settings import AdviceSettings
from workshop.extra import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_deployment(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help='lines of {"prompt": "...", "task": "..."}, or messages',
    )
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        metavar="MODEL",
        help="another smaller model: folder or hub id",
    )
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="a target drafter: eagle3=FOLDER, medusa=FOLDER",
    )
    add_options(parser, AdviceSettings)
    parser.add_argument("--accelerator", help="GPU of the target, whose data sheet tells what steps cost")
    parser.add_argument("--draft-accelerator", help="GPU of the draft [as --accelerator]")
    add_json(parser)
    parser.add_argument("--picture", type=Path, help="file to draw to, .png or .svg; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    """Returns 1, with the reason on stderr, if nothing can be advised."""
    return run_command(lambda: _advise(options))


def _advise(options: argparse.Namespace) -> None:
    if options.picture is not None:
        require("matplotlib", f"--picture {options.picture}")
    options.prompts.open().close()
    asked, heads = read_options(options, AdviceSettings), _heads(options.head)
    check_accelerator(options.accelerator)
    check_accelerator(options.draft_accelerator)
    settings, memories = read_deployment(options)
    check_one_process(settings)

    from transformers import AutoTokenizer  # takes seconds, so arguments are checked first

    from workshop.advice.advise import Adviser
    from workshop.advice.answers import read_prompts
    from workshop.advice.candidates import candidates
    from workshop.advice.report import as_json, report

    prompts = read_prompts(options.prompts, AutoTokenizer.from_pretrained(settings.target.model))
    compared = [*candidates(settings, options.draft, heads)]
    adviser = Adviser(settings, asked, memories, _accelerators(options), report_progress)
    advice = adviser.advise(prompts, compared)
    print_or_write(report(advice), as_json(advice), options.json)
    if options.picture is not None:
        from workshop.advice.picture import draw

        draw(advice, options.picture)


def _accelerators(options: argparse.Namespace) -> Any:
    """Returns both accelerators; the draft's accelerator is by default the target's."""
    from outrider.engine.planning.accelerators import ACCELERATORS
    from workshop.advice.advise import Accelerators

    names = options.accelerator, options.draft_accelerator or options.accelerator
    return Accelerators(*(None if name is None else ACCELERATORS[name] for name in names))


def _heads(given: list[str]) -> dict[str, str]:
    """Returns the checkpoints of heads by drafter. Raises ValueError."""
    heads = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not equals:
            raise ValueError(f"--head {text}: name its drafter too, as eagle3={text}")
        heads[name] = model
    return heads
