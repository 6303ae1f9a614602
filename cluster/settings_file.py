"""Reads a YAML file of settings, with the line of each setting."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.settings_errors import SettingsError


def read_file(file: Path, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the settings of a file as written, and the place of each setting as file:line, by path.

    name: argument that named the file.

    Raises:
        SettingsError: the file cannot be read, or it sets something twice.
    """
    given = f"{name}={str(file)!r}"
    try:
        loader = yaml.SafeLoader(file.read_text())
        node = loader.get_single_node()
        fields: Any = None if node is None else loader.construct_document(node)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{given} cannot be read: {error}") from error
    is_named = isinstance(fields, dict) and all(isinstance(each, str) for each in fields)
    if node is None or not is_named or name in fields:
        raise SettingsError(f"{given} must hold settings by name, and no other {name}")
    places: dict[str, str] = {}
    for path, line in _lines(node):
        place = f"{file}:{line}"
        if path in places:
            raise SettingsError(f"{place}: {path} is given twice, before at {places[path]}")
        places[path] = place
    return fields, places


def _lines(node: yaml.Node, before: str = "") -> Iterator[tuple[str, int]]:
    """Yields the path and line of each name in a mapping and in its nested mappings."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{before}{key.value}"
            yield path, key.start_mark.line + 1
            yield from _lines(value, f"{path}.")
