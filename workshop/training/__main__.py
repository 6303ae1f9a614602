"""Trains a drafter on a target's own text: `python -m workshop.training NAME`.

First `text` lets the target answer prompts. Then a drafter is trained on these answers. A killed training
goes on from its last save when it is started again.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ValidationError

from outrider.engine.errors import EngineError
from workshop.training.card import write_card
from workshop.training.dflash import DFlashTrainee
from workshop.training.eagle3 import Eagle3Trainee
from workshop.training.early_exit import EarlyExitTrainee
from workshop.training.held_out import SumOfMinima
from workshop.training.loop import Training
from workshop.training.medusa import MedusaTrainee
from workshop.training.model import ModelTrainee
from workshop.training.parallel import ParallelTrainee
from workshop.training.settings import (
    AnswerTextSettings,
    CommandSettings,
    DFlashSettings,
    Eagle3Settings,
    EarlyExitSettings,
    MedusaSettings,
    ModelTrainingSettings,
    ParallelSettings,
    TrainingSettings,
)
from workshop.training.target import FrozenTarget
from workshop.training.text import read_text, write_text
from workshop.training.trainee import Trainee

# name: meaning, settings, maker
TRAINEES: dict[str, tuple[str, type[TrainingSettings], Callable[[Any, FrozenTarget], Trainee]]] = {
    "eagle3": ("an EAGLE-3 head", Eagle3Settings, Eagle3Trainee),
    "dflash": ("a DSpark draft", DFlashSettings, DFlashTrainee),
    "medusa": ("Medusa heads", MedusaSettings, MedusaTrainee),
    "early_exit": ("exits of the target itself", EarlyExitSettings, EarlyExitTrainee),
    "model": ("a draft model that drafts token by token", ModelTrainingSettings, ModelTrainee),
    "parallel": ("a draft model that guesses several tokens in one pass", ParallelSettings, ParallelTrainee),
}
TEXT = "text"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 1, with the reason on stderr, if the settings are not accepted."""
    parser = argparse.ArgumentParser(prog="python -m workshop.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_options(commands.add_parser(TEXT, help="the text that is trained on"), AnswerTextSettings)
    for name, (meaning, settings, _) in TRAINEES.items():
        _add_options(commands.add_parser(name, help=meaning), settings)
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if command == TEXT:
            of_text = AnswerTextSettings.model_validate(given)
            torch.set_num_threads(of_text.threads)
            write_text(of_text)
        else:
            _train(command, given)
    except ValidationError as error:
        told = [
            f"{'.'.join(map(str, each['loc']))}={each['input']!r}: {each['msg']}" for each in error.errors()
        ]
        print("outrider:", "; ".join(told), file=sys.stderr)
        return 1
    except (EngineError, ValueError, OSError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    return 0


def _add_options(parser: argparse.ArgumentParser, settings: type[CommandSettings]) -> None:
    for name, field in settings.model_fields.items():
        default = "" if field.is_required() else f" [{field.default}]"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            required=field.is_required(),
            nargs="+" if "tuple" in str(field.annotation) else None,
            help=f"{field.description}{default}",
        )


def _train(command: str, given: dict[str, Any]) -> None:
    _, of_settings, make = TRAINEES[command]
    settings = of_settings.model_validate(given)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    text, held_out = read_text(settings.text)
    target = FrozenTarget(settings.target)
    trainee = make(settings, target)
    training = Training(trainee, target, settings, SumOfMinima(held_out, settings))
    training.run(text)
    training.finish()
    write_card(trainee, command, settings, len(text.tokens))


if __name__ == "__main__":
    sys.exit(main())
