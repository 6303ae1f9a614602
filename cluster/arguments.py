"""Reads the arguments of ``serve run cluster.app``, and the files that they name, into Settings.

A setting's name is its path: ``target.tensor_parallel=4``. ``target=MODEL`` and ``draft=MODEL`` are short for
``target.model`` and ``drafts.model.model``. A file holds groups of settings, or such names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from pydantic import ValidationError

from cluster.groups import DEFAULT_DRAFT
from cluster.settings import Settings
from cluster.settings_errors import RESOURCES, SettingsError, refusal
from cluster.settings_file import read_file

Fields: TypeAlias = dict[str, Any]  # fields by group, or by name within a group

CONFIG = "config"
SHORT = {"target": "target.model", "draft": f"drafts.{DEFAULT_DRAFT}.model"}  # short names, for string values


def read_settings(arguments: Mapping[str, Any]) -> Settings:
    """Returns the settings from arguments and from the files that they name.

    arguments: values by name, as text or typed. ``config`` names a YAML file, or a folder of ``*.yaml`` files
        with each setting in one file. Arguments win, setting by setting.

    Raises:
        SettingsError: a file cannot be read, or a setting is not accepted.
    """
    fields = _grouped({name: value for name, value in arguments.items() if name != CONFIG})
    places: dict[str, str] = {}
    if CONFIG in arguments:
        files = [(file, *read_file(file, CONFIG)) for file in _files(arguments[CONFIG])]
        of_files = together((str(file), given) for file, given, _ in files)
        for _, _, of_file in files:
            places |= of_file | {SHORT[name]: of_file[name] for name in SHORT.keys() & of_file.keys()}
        places |= dict.fromkeys(_paths(fields), "")
        fields = _merged(of_files, fields)
    return validated(fields, places)


def validated(fields: Fields, places: Mapping[str, str] = MappingProxyType({})) -> Settings:
    """Returns validated settings.

    places: place of each setting as file:line, by path; empty for an argument.

    Raises:
        SettingsError: a setting is not accepted.
    """
    try:
        return Settings.model_validate(fields)
    except ValidationError as error:
        raise SettingsError(refusal(error, places)) from None  # the message is complete without the cause


def together(sources: Iterable[tuple[str, Mapping[str, Any]]]) -> Fields:
    """Returns the settings of all named sources. Raises SettingsError for a repeated setting."""
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
            continue  # an empty group, which YAML reads as None
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
        for name in below.keys() & above.keys() - {RESOURCES}
        if isinstance(below[name], dict) and isinstance(above[name], dict)
    }
    return {**below, **above, **both}


def _in_both(fields: Fields, others: Fields) -> str:
    """Returns the names of settings in both, separated by commas; empty if there are none."""
    return ", ".join(sorted({*_paths(fields)} & {*_paths(others)}))


def _paths(fields: Fields, before: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict) and name != RESOURCES:
            yield from _paths(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _is_json(text: str) -> bool:
    return text == "null" or text.startswith(("{", "["))


def _read_value(name: str, value: Any) -> Any:
    """Parses JSON. Numbers and booleans stay strings: pydantic converts them by their field's type."""
    if not isinstance(value, str) or not _is_json(value):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise SettingsError(f"{name}={value!r} is no JSON: {error}") from error


def _files(path: str) -> list[Path]:
    place = Path(path)
    files = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    if not files:
        raise SettingsError(f"{CONFIG}={path!r} is a folder without *.yaml files: put settings into one")
    return files
