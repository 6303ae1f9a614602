"""Tables of settings in the docs.

A table has a row for each field of a model and of the models nested in it: name, unit, default, accepted
values, meaning.
"""

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.settings import Settings
from cluster.tenants import Tenancy
from gateway.settings import Speculation
from outrider.decoding.settings import RequestedSampling
from outrider.ray.llm_config import BuilderArguments, LLMConfig
from workshop.checking.settings import CheckSettings
from workshop.markdown import table
from workshop.pages.marks import COMMAND, DOCS, rewritten

# models by page and mark
TABLES: dict[tuple[str, str], type[BaseModel]] = {
    ("configuration.md", "settings"): Settings,
    ("requests.md", "sampling"): RequestedSampling,
    ("requests.md", "speculation"): Speculation,
    ("checking.md", "check"): CheckSettings,
    ("tenants.md", "tenants"): Tenancy,
    ("ray-llm.md", "arguments"): BuilderArguments,
    ("ray-llm.md", "llm-config"): LLMConfig,
}
# Unit by the last word of a field's name, or by the word before "per".
# A field overrides it with json_schema_extra={"unit": "..."}.
UNITS = {
    "s": "seconds",
    "days": "days",
    "ms": "milliseconds",
    "bytes": "bytes",
    "memory": "bytes, or a share",
    "tokens": "tokens",
    "depth": "tokens",
    "threads": "threads",
    "gpus": "GPUs",
    "cpus": "CPUs",
    "sequences": "sequences",
    "requests": "requests",
    "steps": "steps",
    "waiting": "requests",
    "choices": "answers",
    "losses": "targets",
    "gateways": "replicas",
    "targets": "replicas",
    "drafts": "replicas",
    "replicas": "replicas",
    "ahead": "verdicts",
    "port": "TCP port",
    "from": "sequences",
    "k": "tokens",
    "parallel": "devices",
    "logprobs": "tokens",
}
BOUNDS = ((Gt, "gt", "above"), (Ge, "ge", "at least"), (Lt, "lt", "below"), (Le, "le", "at most"))
KINDS = {bool: "`true`, `false`", int: "integer", float: "number", str: "text", Any: "anything"}
MAX_PLAIN = 10**15  # larger powers of two are written as 2^n
ANY_NAME = "NAME"
LISTS = (list, tuple, set, frozenset)
HEADER = ("field", "unit", "default", "accepted", "meaning")


@dataclass(frozen=True)
class Section:
    """Fields of one model at one place; ``path`` is the prefix of their names."""

    path: str
    model: type[BaseModel]
    rows: list[list[str]]
    title: str = ""  # empty for the outermost model


def sections(model: type[BaseModel]) -> Iterator[Section]:
    """Yields the sections of a model and of the models nested in it, outermost first."""
    return _sections(model, "", "", None, ())


def _sections(
    model: type[BaseModel], path: str, title: str, instance: BaseModel | None, above: tuple[type, ...]
) -> Iterator[Section]:
    """Yields the sections.

    Args:
        instance: default of the field that holds the model, if it has one.
        above: models that the model is nested in.
    """
    rows = []
    nested: list[tuple[type[BaseModel], str, str, BaseModel | None, tuple[type, ...]]] = []
    for name, field in model.model_fields.items():
        full = f"{path}{name}"
        if instance is None:
            default = field.get_default(call_default_factory=True, validated_data={})
        else:
            default = getattr(instance, name)
        inner = list(_models(field.annotation, full))
        if not (inner and isinstance(default, BaseModel)):
            rows.append(_row(full, field, default))
        for place, inner_model in inner:
            if inner_model in (*above, model):
                continue
            is_alone = sum(place == other for other, _ in inner) == 1
            heading = f"`{place}`" if is_alone else f"`{place}`, {inner_model.__name__}"
            held = default if place == full and isinstance(default, inner_model) else None
            nested.append((inner_model, f"{place}.", heading, held, (*above, model)))
    if rows:
        yield Section(path, model, rows, title)
    for arguments in nested:
        yield from _sections(*arguments)


def _models(annotation: Any, path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yields the models in an annotation, each with its path. A dictionary's path contains ANY_NAME."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, annotation
        return
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        yield from _models(arguments[0], path)
    elif isinstance(get_origin(annotation), type) and issubclass(get_origin(annotation), Mapping):
        yield from _models(arguments[1], f"{path}.{ANY_NAME}")
    elif get_origin(annotation) is not Literal:
        place = f"{path}[]" if get_origin(annotation) in LISTS else path
        for argument in arguments:
            yield from _models(argument, place)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _row(name: str, field: FieldInfo, default: Any) -> list[str]:
    accepted = " or ".join(dict.fromkeys(_accepted(field.annotation, field.metadata, default)))
    cells = [f"`{name}`", _unit(name, field), _written(default), accepted, field.description or ""]
    return [" ".join(cell.split()).replace("|", "\\|") for cell in cells]


def _unit(name: str, field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict) and "unit" in field.json_schema_extra:
        return str(field.json_schema_extra["unit"])
    kinds = {kind for kind, _ in _leaves(field.annotation, field.metadata)} - {type(None)}
    if not kinds or not kinds <= {int, float}:
        return ""
    words = re.split(r"[._]", name.rpartition(".")[2])
    return UNITS.get(words[words.index("per") - 1] if "per" in words[1:] else words[-1], "")


def _leaves(annotation: Any, metadata: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the alternatives of an annotation, each with its constraints."""
    own = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    if get_origin(annotation) is Annotated:
        inner, *added = get_args(annotation)
        yield from _leaves(inner, [*own, *added])
    elif len(_alternatives(annotation)) > 1:
        for alternative in _alternatives(annotation):
            yield from _leaves(alternative, own)
    else:
        yield annotation, own


def _accepted(annotation: Any, metadata: Iterable[Any], default: Any) -> Iterator[str]:
    leaves = list(_leaves(annotation, metadata))
    kinds = [kind for kind, _ in leaves]
    for kind, own in leaves:
        if kind is type(None):
            if default is not None:
                yield "`null`"
        elif kind is not int or float not in kinds or _bounds(own) != _bounds(leaves[kinds.index(float)][1]):
            yield f"{_kind(kind)}{_bounds(own)}"


def _kind(annotation: Any) -> str:
    """Returns a type in words."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return f"{_kind(inner)}{_bounds(metadata)}"
    if len(_alternatives(annotation)) > 1:
        return " or ".join(dict.fromkeys(map(_kind, _alternatives(annotation))))
    origin, arguments = get_origin(annotation), [a for a in get_args(annotation) if a is not ...]
    if origin is Literal:
        return ", ".join(map(_written, arguments))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{_kind(arguments[1])}, for each {_kind(arguments[0])}"
    if origin in LISTS:
        return f"list, each {' or '.join(map(_kind, arguments))}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "the fields below"
    return KINDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounds(metadata: Iterable[Any]) -> str:
    """Returns the bounds in words, each with a leading space; empty if there are none."""
    own = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    found = {
        words: getattr(limit, attribute)
        for kind, attribute, words in BOUNDS
        for limit in own
        if isinstance(limit, kind)
    }
    if found.keys() == {"at least", "at most"}:
        said = [f"from {_number(found['at least'])} to {_number(found['at most'])}"]
    else:
        said = [" and ".join(f"{words} {_number(bound)}" for words, bound in found.items())]
    said += [f"with at least {limit.min_length} in it" for limit in own if isinstance(limit, MinLen)]
    said += [f"with at most {limit.max_length} in it" for limit in own if isinstance(limit, MaxLen)]
    said += [f"that matches `{limit.pattern}`" for limit in own if getattr(limit, "pattern", None)]
    return "".join(f" {words}" for words in said if words)


def _number(bound: Any) -> str:
    if isinstance(bound, int) and bound > MAX_PLAIN and bound & (bound - 1) == 0:
        return f"2^{bound.bit_length() - 1}"
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _written(default: Any) -> str:
    """Returns a value as it is written in YAML."""
    if default is PydanticUndefined:
        return "needed"
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"`{default if isinstance(default, str) else json.dumps(default, default=_plain)}`"


def _plain(value: Any) -> Any:
    """Converts a value that JSON cannot represent."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def tables(model: type[BaseModel]) -> str:
    """Returns a table for the model in Markdown, and below headings the tables of nested models."""
    parts = []
    for section in sections(model):
        first, _, _ = (section.model.__dict__.get("__doc__") or "").strip().partition("\n\n")
        words = " ".join(first.split()).replace("``", "`")
        above = [f"### {section.title}", words] if section.title else []
        parts.append("".join(f"{line}\n\n" for line in above if line) + table(HEADER, section.rows))
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """Returns the rewritten pages by name. Raises ValueError if a page has lost its marks."""
    texts: dict[str, str] = {}
    for (page, mark), model in TABLES.items():
        text = texts.get(page) or (DOCS / page).read_text()
        texts[page] = rewritten(text, mark, COMMAND, tables(model))
    return texts
