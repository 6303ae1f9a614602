"""Reads the arguments of ``build_openai_app``, and reports arguments without effect."""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cluster.settings_errors import SettingsError
from outrider.ray.llm_config import BuilderArguments, LLMConfig
from outrider.ray.mirror import NO_MEANING, Mirror

PAGE = "docs/ray-llm.md"
MirrorT = TypeVar("MirrorT", bound=Mirror)


def read_arguments(arguments: Mapping[str, Any]) -> tuple[BuilderArguments, LLMConfig]:
    """Returns the arguments and their single config.

    arguments: values as a config file has them, or as text of a command line: JSON, or the path of a file.

    Raises:
        SettingsError: a file cannot be read, or a field is not accepted.
    """
    builder = _validated(BuilderArguments, {name: _value(given) for name, given in arguments.items()})
    (config,) = builder.llm_configs
    return builder, _validated(LLMConfig, _read(config) if isinstance(config, str) else config)


def unheeded(given: Mirror, path: str = "") -> Iterator[str]:
    """Yields a line for each field that was given and has no meaning here."""
    for name, field in type(given).model_fields.items():
        value = getattr(given, name)
        if isinstance(value, Mirror):
            yield from unheeded(value, f"{path}{name}.")
        elif value is not None and field.json_schema_extra == {NO_MEANING: True}:
            yield f"{path}{name}={value!r} has {field.description}"


def _value(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given) if given.startswith(("{", "[")) else [given]
    except ValueError as error:
        raise SettingsError(f"{given!r} is no JSON: {error}") from error


def _read(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"llm_configs={path!r} cannot be read: {error}") from error


def _validated(model: type[MirrorT], given: Any) -> MirrorT:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        lines = [_refusal(model, found) for found in error.errors(include_url=False)]
        raise SettingsError("\n".join(lines)) from None  # the message is complete without the cause


def _refusal(model: type[BaseModel], found: ErrorDetails) -> str:
    """Returns name, value and accepted values of a field that is not accepted."""
    place, (owner, field) = ".".join(map(str, found["loc"])), _found(model, found["loc"])
    given = f"{place}={found['input']!r}"
    match found["type"]:
        case "extra_forbidden":
            near = get_close_matches(str(found["loc"][-1]), owner.model_fields)
            return f"{given} is no field here: {' or '.join(near) + ' is one' if near else f'see {PAGE}'}"
        case "missing":
            return f"{place} is missing{_meaning(field)}"
        case "value_error":
            return ": ".join(filter(None, (place, str(found["ctx"]["error"]))))
        case _:
            wanted = found["msg"].partition(" should ")[2] or found["msg"]
            return f"{given} should {wanted}{_meaning(field)}"


def _found(model: type[BaseModel], path: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """Returns the innermost model on the path, and the field that the path names; None: it names no field."""
    field = None
    for part in path:
        if field is not None:
            kinds = (field.annotation, *get_args(field.annotation))
            inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Mirror)]
            model = inner[0] if inner else model
        field = model.model_fields.get(str(part), None if field is None or inner else field)
    return model, field


def _meaning(field: FieldInfo | None) -> str:
    return f": {field.description}" if field is not None and field.description else ""
