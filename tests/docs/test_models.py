"""The tables of model families in the docs say what the engine does with each."""

import pytest

from workshop.pages.families_tables import FAMILIES, Family, family_of, pages
from workshop.pages.marks import COMMAND, DOCS


@pytest.mark.parametrize("page", ["models.md"])
def test_docs_have_the_families_as_the_engine_takes_them(page: str) -> None:
    text = pages()[page]
    assert text == (DOCS / page).read_text(), f"run {COMMAND}"
    assert text.count("| `") >= len(FAMILIES)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("qwen3_moe", Family(None, True, "weights, cache", "all", "yes", has_mtp=False)),
        ("qwen3_5_text", Family(None, False, "weights, cache", "all", "no", has_mtp=True)),
        ("phi3", Family(None, False, "weights", "all", "yes", has_mtp=False)),
        ("gemma4_text", Family(None, False, "weights, cache", "all", "on a CPU", has_mtp=False)),
        ("afmoe", Family(None, False, "weights", "all but experts", "no", has_mtp=False)),
    ],
)
def test_family_is_told_by_its_parts(kind: str, expected: Family) -> None:
    assert family_of(kind) == expected


def test_family_that_is_refused_is_told_with_its_reason() -> None:
    assert family_of("deepseek_v32") == Family(
        "attends to tokens that an indexer chooses (sparse attention), for which there is no cache here"
    )
