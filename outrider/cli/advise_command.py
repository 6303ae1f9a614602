"""``outrider advise outrider.yaml --prompts prompts.jsonl``: which draft suits a target and its prompts."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from outrider.cli.deployment import add_arguments, check_accelerator, read_deployment, run_or_say_why


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("advise", help="which draft suits a target, judged on your own prompts")
    add_arguments(parser)
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
        help="a smaller model more: folder or hub id",
    )
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="a drafter beside the target: eagle3=FOLDER, medusa=FOLDER",
    )
    parser.add_argument("--temperatures", type=float, nargs="+", help="at which the target answers [0 0.7 1]")
    parser.add_argument("--tokens", type=int, help="of an answer at most [128]")
    parser.add_argument("--seed", type=int, help="of the answers [1]")
    parser.add_argument("--depth", type=int, help="drafted tokens in a round at most [8]")
    parser.add_argument("--streams", type=int, nargs="+", help="at a time [1 8 32 128]")
    parser.add_argument("--round-ms", type=float, help="of a round beside the steps [3]")
    parser.add_argument("--repetitions", type=int, help="measured steps of each size [3]")
    parser.add_argument("--candidate-seconds", type=float, help="for a candidate, once it is loaded [120]")
    parser.add_argument("--price-per-hour", type=float, help="dollars, of the devices of a target replica")
    parser.add_argument("--draft-price-per-hour", type=float, help="dollars, of a draft's own device")
    parser.add_argument("--accelerator", help="of a target: its data sheet tells what steps cost")
    parser.add_argument("--draft-accelerator", help="of a draft [as --accelerator]")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--picture", type=Path, help="file to draw to, .png or .svg; needs matplotlib")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """1, with the reason, where nothing can be advised."""
    return run_or_say_why(lambda: _advise(options))


def _advise(options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from workshop.advice.advise import Adviser
    from workshop.advice.answers import read_prompts
    from workshop.advice.candidates import candidates
    from workshop.advice.report import as_json, report

    if options.picture is not None:
        _check_picture(options.picture)
    asked, accelerators = _asked(options), _accelerators(options)
    settings, memories = read_deployment(options)
    if settings.target.tensor_parallel > 1:
        raise ValueError(
            f"target.tensor_parallel={settings.target.tensor_parallel}: the target answers in one process "
            "here; give 1, on a device that holds it"
        )
    prompts = read_prompts(options.prompts, AutoTokenizer.from_pretrained(settings.target.model))
    compared = [*candidates(settings, options.draft, _heads(options.head))]
    adviser = Adviser(settings, asked, memories, accelerators, _tell)
    advice = adviser.advise(prompts, compared)
    print(report(advice))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(advice), indent=1) + "\n")
    if options.picture is not None:
        from workshop.advice.picture import draw

        draw(advice, options.picture)


def _asked(options: argparse.Namespace) -> Any:
    """Raises ValueError that names an option with its value."""
    from pydantic import ValidationError

    from workshop.advice.settings import AdviceSettings

    given = {name: getattr(options, name) for name in AdviceSettings.model_fields}
    try:
        return AdviceSettings.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ValueError(f"--{option} {first['input']}: {first['msg']}") from None


def _accelerators(options: argparse.Namespace) -> Any:
    """A draft without one of its own is on the target's."""
    from outrider.engine.planning.step_costs import ACCELERATORS
    from workshop.advice.advise import Accelerators

    names = options.accelerator, options.draft_accelerator or options.accelerator
    for name in names:
        check_accelerator(name)
    return Accelerators(*(None if name is None else ACCELERATORS[name] for name in names))


def _heads(given: list[str]) -> dict[str, str]:
    """By drafter. Raises ValueError."""
    heads = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not equals:
            raise ValueError(f"--head {text}: name its drafter too, as eagle3={text}")
        heads[name] = model
    return heads


def _check_picture(file: Path) -> None:
    """Before anything is computed. Raises ValueError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(f"--picture {file} needs matplotlib: pip install 'outrider[advice]'") from None


def _tell(what: str) -> None:
    print(f"outrider: {what}", file=sys.stderr, flush=True)
