"""Reads the arguments of ``serve run cluster.app``, and the files that they name, into Settings.

A setting's name is its path: ``target.tensor_parallel=4``. ``target=MODEL`` and ``draft=MODEL`` are short for
``target.model`` and ``drafts.model.model``. A file holds groups of settings, or such names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import ValidationError

from cluster.groups import DEFAULT_DRAFT
from cluster.settings import Settings
from cluster.settings_errors import refusal

Fields: TypeAlias = dict[str, Any]  # fields by group, or by name within a group

CONFIG = "config"
SHORT = {"target": "target.model", "draft": f"drafts.{DEFAULT_DRAFT}.model"}  # settings whose value is a text
WHOLE = "resources"  # setting that is a dictionary, alone among all settings


class SettingsError(ValueError):
    """Raised for refused settings; the message names each with its value and what would be accepted."""


def read_settings(arguments: Mapping[str, Any]) -> Settings:
    """Returns the settings that arguments and their file give.

    arguments: values by name, as text or typed. ``config`` names a YAML file, or a folder of ``*.yaml`` files
        with each setting in one file. Arguments win, setting by setting.

    Raises:
        SettingsError: a file cannot be read, or something is not accepted.
    """
    fields = _grouped({name: value for name, value in arguments.items() if name != CONFIG})
    if CONFIG in arguments:
        fields = _merged(together(_files(arguments[CONFIG])), fields)
    return validated(fields)


def validated(fields: Fields) -> Settings:
    """Returns validated settings. Raises SettingsError."""
    try:
        return Settings.model_validate(fields)
    except ValidationError as error:
        raise SettingsError(refusal(error)) from None  # the message says all of it


def together(sources: Iterable[tuple[str, Mapping[str, Any]]]) -> Fields:
    """Returns the settings of all named sources. Raises SettingsError if two sources have one setting."""
    fields: Fields = {}
    for source, given in sources:
        more = _grouped(given)
        if twice := _in_both(fields, more):
            raise SettingsError(f"{source} sets {twice} again: give each setting once")
        fields = _merged(fields, more)
    return fields


def _grouped(given: Mapping[str, Any]) -> Fields:
    """Returns settings by group, with short forms written out and JSON read."""
    fields: Fields = {}
    for name, value in given.items():
        path = SHORT.get(name, name) if isinstance(value, str) and not _is_json(value) else name
        if value is None and "." not in path:
            continue  # an empty group, as YAML has it
        group: Any = _read_value(name, value)
        for part in reversed(path.split(".")):
            group = {part: group}
        if twice := _in_both(fields, group):
            raise SettingsError(f"{twice} is given twice: {name}={value!r} is the second")
        fields = _merged(fields, group)
    return fields


def _merged(below: Fields, above: Fields) -> Fields:
    """Merges setting by setting; ``above`` wins."""
    both = {
        name: _merged(below[name], above[name])
        for name in below.keys() & above.keys() - {WHOLE}
        if isinstance(below[name], dict) and isinstance(above[name], dict)
    }
    return {**below, **above, **both}


def _in_both(fields: Fields, others: Fields) -> str:
    """Returns the names of settings in both; none: an empty text."""
    return ", ".join(sorted({*_paths(fields)} & {*_paths(others)}))


def _paths(fields: Fields, before: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict) and name != WHOLE:
            yield from _paths(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _is_json(text: str) -> bool:
    return text == "null" or text.startswith(("{", "["))


def _read_value(name: str, value: Any) -> Any:
    """Reads a value. Numbers and booleans stay text: the type of their field reads them."""
    if not isinstance(value, str) or not _is_json(value):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise SettingsError(f"{name}={value!r} is no JSON: {error}") from error


def _files(path: str) -> Iterator[tuple[str, Fields]]:
    place = Path(path)
    files = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    if not files:
        raise SettingsError(f"{CONFIG}={path!r} is a folder without *.yaml files: put settings into one")
    for file in files:
        yield str(file), _read(file)


def _read(file: Path) -> Fields:
    try:
        fields = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{CONFIG}={str(file)!r} cannot be read: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields) or CONFIG in fields:
        raise SettingsError(f"{CONFIG}={str(file)!r} must hold settings by name, and no other {CONFIG}")
    return fields
