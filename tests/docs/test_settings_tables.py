"""The tables of settings: what models say of themselves, however they are nested; and the docs' copy."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from cluster.settings import Settings
from workshop.pages.marks import COMMAND, DOCS, begin, end, rewritten
from workshop.pages.settings_tables import pages, sections, tables


class Pace(BaseModel):
    """Depth of Drafts, and
    who decides it.

    Details stay in the code.
    """

    depth: int = Field(default=4, ge=0, le=16, description="tokens drafted")


class Small(BaseModel):
    kind: Literal["small"] = "small"
    model: str = Field(description="a folder | a hub id")
    pace: Pace = Pace(depth=7)
    next: "Small | None" = None


class Lookup(BaseModel):
    kind: Literal["lookup"] = "lookup"
    pause_s: float = Field(default=0.5, gt=0.0, lt=9.0, json_schema_extra={"unit": "fortnights"})


class Nested(BaseModel):
    own: Pace = Field(default_factory=Pace)
    maybe: Pace | None = None
    drafts: dict[str, Annotated[Small | Lookup, Field(discriminator="kind")]] = {}
    several: list[Lookup] = []
    memory: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0.0, lt=1.0)] | None = None


def cells(table: str, name: str) -> list[str]:
    """Returns unit, default, accepted values and meaning in the row of a field."""
    (row,) = (line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
    return [cell.strip() for cell in row.replace("\\|", "&").split("|")[2:-1]]


@pytest.mark.parametrize("page", pages())
def test_docs_have_the_settings_of_the_code(page: str):
    assert pages()[page] == (DOCS / page).read_text(), f"run {COMMAND}"


def fields_of(model: type[BaseModel]) -> int:
    return sum(len(section.rows) for section in sections(model))


def test_tables_have_a_row_for_every_setting():
    table = tables(Settings)
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            assert f"### `{name}`" in table
        else:
            assert f"| `{name}` |" in table
    assert table.count("\n| `") == fields_of(Settings) >= len(Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own.depth", ["tokens", "`4`", "integer from 0 to 16", "tokens drafted"]),
        ("maybe", ["", "`null`", "the fields below", ""]),
        ("maybe.depth", ["tokens", "`4`", "integer from 0 to 16", "tokens drafted"]),
        ("drafts", ["", "`{}`", "the fields below, for each text", ""]),
        ("drafts.NAME.model", ["", "needed", "text", "a folder & a hub id"]),
        ("drafts.NAME.pace.depth", ["tokens", "`7`", "integer from 0 to 16", "tokens drafted"]),
        ("drafts.NAME.pause_s", ["fortnights", "`0.5`", "number above 0 and below 9", ""]),
        ("several[].pause_s", ["fortnights", "`0.5`", "number above 0 and below 9", ""]),
        (
            "memory",
            ["bytes, or a share", "`null`", "integer at least 1 or number above 0 and below 1", ""],
        ),
    ],
)
def test_field_tells_unit_default_range_and_meaning(name: str, expected: list[str]):
    assert cells(tables(Nested), name) == expected


def test_models_that_share_a_place_are_told_apart():
    titles = [section.title for section in sections(Nested)]
    assert titles.count("`drafts.NAME`, Small") == titles.count("`drafts.NAME`, Lookup") == 1


def test_group_is_told_by_the_whole_first_paragraph_of_its_docstring():
    assert "### `own`\n\nDepth of Drafts, and who decides it.\n\n| field" in tables(Nested)


def test_model_within_itself_ends():
    assert cells(tables(Small), "next") == ["", "`null`", "the fields below", ""]


def test_rewritten_changes_only_the_part_between_the_marks():
    page = f"before\n{begin('a', 'run')}old\n{end('a')}after\n"
    assert rewritten(page, "a", "run", "new\n") == page.replace("old", "new")


@pytest.mark.parametrize("page", ["", begin("a", "run"), 2 * f"{begin('a', 'run')}{end('a')}"])
def test_marks_that_are_missing_or_there_twice_are_refused(page: str):
    with pytest.raises(ValueError, match="marks once"):
        rewritten(page, "a", "run", "new\n")
