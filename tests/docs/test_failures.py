"""docs/failures.md: its table of kills names tests that are there, and every test that kills."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
KILLING = re.compile(r"\bSIGKILL\b|\bSIGSTOP\b|\.kill\(\)")


def table() -> set[tuple[str, str]]:
    """Files and functions."""
    section = PAGE.read_text().partition("## Kills that are tested")[2].partition("\n## ")[0]
    return {*re.findall(r"`([\w/]+\.py)::(\w+)` \|$", section, re.M)}


def killing(file: Path) -> set[str]:
    """Tests of a file, where something in it kills."""
    text = file.read_text()
    if not KILLING.search(text):
        return set()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, functions))
    return {name for name in names if name.startswith("test_")}


def test_every_test_that_it_names_is_there_and_kills() -> None:
    assert len(table()) > 20
    for file, name in table():
        assert name in killing(ROOT / file), f"{file}::{name}"


def test_every_file_of_the_service_s_tests_that_kills_is_named() -> None:
    folders = (ROOT / "tests" / name for name in ("actors", "cluster", "decoding", "gateway"))
    files = [file for folder in folders for file in folder.rglob("test_*.py")]
    assert {str(file.relative_to(ROOT)) for file in files if killing(file)} == {file for file, _ in table()}
