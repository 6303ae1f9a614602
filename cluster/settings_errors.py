"""Messages about refused settings: each with its path, its value and what would be accepted."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cluster.groups import DEFAULT_DRAFT, DraftSettings
from cluster.settings import Settings

NO_GROUP = ("model_type", "model_attributes_type", "dict_type")  # pydantic's types of errors
OTHER_NAMES = ("config", "draft")  # arguments that are no field of Settings
RESOURCES = "resources"  # the only setting whose value is a dictionary: users choose its names


class SettingsError(ValueError):
    """Raised for refused settings; the message names each with its value and what would be accepted."""


def refusal(error: ValidationError, places: Mapping[str, str]) -> str:
    """Returns a line for each refused setting.

    places: place of each setting as file:line, by path; empty for an argument.
    """
    by_setting: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for found in error.errors(include_url=False):
        by_setting.setdefault(_setting(found["loc"]), []).append(found)
    return "\n".join(_place(setting, places) + _line(setting, found) for setting, found in by_setting.items())


def _place(setting: Sequence[str], places: Mapping[str, str]) -> str:
    """Returns the place of the setting or of its group, as a prefix; empty if it is in no file."""
    paths = (".".join(setting[:depth]) for depth in range(len(setting), 0, -1))
    place = next((places[path] for path in paths if path in places), "")
    return f"{place}: " if place else ""


def _line(setting: tuple[str, ...], found: Sequence[ErrorDetails]) -> str:
    """Returns the line of a setting.

    found: errors of the setting; several if it has several forms and matches no form.
    """
    name, first = ".".join(setting), found[0]
    given = f"{name}={first['input']!r}"
    match first["type"]:
        case "extra_forbidden":
            return f"{given} is no setting: {_known(setting)}"
        case "missing":
            return f"{name} is missing{_meaning(setting)}"
        case "value_error" if _is_field(setting):
            return f"{given}: {first['ctx']['error']}"
        case "value_error":  # refused by a validator of a group or of Settings
            return ".".join((*setting, str(first["ctx"]["error"])))
        case _:
            return f"{given} should {' or '.join(map(_wanted, found))}{_meaning(setting)}"


def _setting(location: Sequence[int | str]) -> tuple[str, ...]:
    """Returns the path of a setting, without the types that pydantic tried."""
    path = tuple(str(part) for part in location)
    depth = 3 if path[:1] == ("drafts",) else 2
    depth += path[depth - 1 : depth] == (RESOURCES,)
    return tuple(part for part in path[:depth] if part != "[key]")


def _is_field(setting: Sequence[str]) -> bool:
    """Whether the path names a setting, and not a group of settings."""
    return len(setting) > (2 if setting[:1] == ("drafts",) else 1)


def _wanted(found: ErrorDetails) -> str:
    if found["type"] in NO_GROUP:
        return "hold settings by name"
    message = found["msg"]
    return message.partition(" should ")[2].partition(", unable to ")[0] or message


def _meaning(setting: Sequence[str]) -> str:
    """Returns the field's description, to be appended to a message."""
    *group, name = setting if RESOURCES not in setting else setting[: setting.index(RESOURCES) + 1]
    field = _fields(group).get(name)
    return f": {field.description}" if field and field.description else ""


def _known(setting: Sequence[str]) -> str:
    """Returns similar names, of the same group if there are any; else all names of the group."""
    *group, name = setting
    by_name: dict[str, list[str]] = {}
    for path in _paths(group[1] if len(group) == 2 else DEFAULT_DRAFT):
        by_name.setdefault(path[-1], []).append(".".join(path))
    near = [path for match in get_close_matches(name, by_name) for path in by_name[match]]
    same_group = [path for path in near if path.rpartition(".")[0] == ".".join(group)]
    if near:
        return " or ".join(same_group or near) + " is one"
    return f"{'.'.join(group) or 'a deployment'} has {', '.join(_fields(group))}"


def _paths(draft: str) -> Iterator[tuple[str, ...]]:
    """Yields all settings by path, with the draft of this name."""
    yield from ((name,) for name in (*Settings.model_fields, *OTHER_NAMES))
    for name in Settings.model_fields:
        group = ("drafts", draft) if name == "drafts" else (name,)
        yield from ((*group, field) for field in _fields(group))


def _fields(group: Sequence[str]) -> dict[str, FieldInfo]:
    if not group:
        return Settings.model_fields
    if group[0] == "drafts":
        return DraftSettings.model_fields if len(group) == 2 else {}
    model = Settings.model_fields[group[0]].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model.model_fields
