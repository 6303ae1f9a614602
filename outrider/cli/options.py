"""Options of a command that are the fields of a settings class."""

import argparse
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def add_options(
    parser: argparse.ArgumentParser, model: type[BaseModel], names: Iterable[str] | None = None
) -> None:
    """Adds an option for each field, with its default and its description.

    names: fields that become options; None: all fields.
    """
    for name in names or model.model_fields:
        field = model.model_fields[name]
        is_list = "tuple" in str(field.annotation)
        default = field.default if not isinstance(field.default, tuple) else " ".join(map(str, field.default))
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            nargs="+" if is_list else None,
            metavar=name.rpartition("_")[2].upper(),
            help=f"{field.description}{'' if default is None else f' [{default}]'}".replace("%", "%%"),
        )


def read_options(options: argparse.Namespace, model: type[Model]) -> Model:
    """Returns the settings that the options give. A list takes spaces or commas between its values.

    Raises:
        ValueError: a value is not accepted; the message names its option.
    """
    given = {name: _parts(value) for name, value in vars(options).items() if name in model.model_fields}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise ValueError(f"--{option} {first['input']}: {first['msg']}") from None


def _parts(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [part for word in value for part in word.split(",") if part]
