"""Docstrings, comments, pages and names of tests can be read alone: the rule is in CONTRIBUTING.md."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("outrider", "protos", "actors", "gateway", "cluster")
READ = (*PRODUCT, "workshop", "bench", "examples", "k8s", "tests", "docs", ".")
HEADLESS = "Of|That|Those|Whose|As|By|With|In|For|From|On|At|To|Without"
DOCSTRING = re.compile(rf'^\s*[rbf]*"""\s*({HEADLESS})\b')
COMMENT = re.compile(r"# (of|that|by|whose|those|likewise|the same)\b")
PROTO_COMMENT = re.compile(rf"//+ (of|that|by|whose|those|likewise|the same|{HEADLESS})\b")
PAGE = re.compile(r"\b(so many|likewise)\b")
STAND_IN = re.compile(  # words in place of a noun that was named before
    r"\bones\b|\b(the|this|that|another|older|next|last|first|new|old) one(?= before\b|[.,;:]|$)"
    r"|\bso many\b|\blikewise\b"
)
RULES = {".py": (DOCSTRING, COMMENT), ".proto": (PROTO_COMMENT,), ".md": (PAGE,)}
PRONOUN = re.compile(
    r"test_(a|an|the|it|its|they|their|that|those|this|these|what|which|who|whom|whose|whoever|nobody"
    r"|somebody|everybody|one|none|he|she)_"
)


def files(*suffixes: str) -> list[Path]:
    """Files of ours with these suffixes, without generated ones."""
    found = (path for top in READ for path in (ROOT / top).glob("*" if top == "." else "**/*"))
    return sorted(path for path in {*found} if path.suffix in suffixes and "_pb2" not in path.name)


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def headless_lines() -> dict[str, list[str]]:
    """Lines that break the rule, by folder."""
    found = defaultdict(list)
    for path in files(*RULES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(rule.search(line) for rule in RULES[path.suffix]):
                found[folder_of(path)].append(f"{path.name}:{number}: {line.strip()}")
    return found


def texts(path: Path) -> Iterator[str]:
    """Yields the docstrings and the comments of a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def stand_ins() -> list[str]:
    """Places of the product in which a word stands for a noun."""
    read = {*PRODUCT, "workshop", "bench", "examples"}
    own = [path for path in files(".py") if path.relative_to(ROOT).parts[0] in read]
    return [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in own
        for text in texts(path)
        for found in STAND_IN.finditer(text)
    ]


def pronoun_names() -> dict[str, list[str]]:
    """Names of tests that begin with a pronoun or an article, by folder."""
    found = defaultdict(list)
    for path in files(".py"):
        if path.name.startswith("test_"):
            for name in re.findall(r"def (test_\w+)\(", path.read_text()):
                if PRONOUN.match(name):
                    found[folder_of(path)].append(f"{path.name}: {name}")
    return found


def test_docstrings_and_comments_name_their_noun() -> None:
    assert headless_lines() == {}


def test_docstrings_and_comments_repeat_their_noun() -> None:
    assert stand_ins() == []


def test_names_of_tests_name_their_unit() -> None:
    assert pronoun_names() == {}


def test_packages_say_what_they_are_for() -> None:
    packages = (path for path in files(".py") if path.name == "__init__.py")
    silent = {folder_of(path) for path in packages if not ast.get_docstring(ast.parse(path.read_text()))}
    assert {name for name in silent if name.split("/")[0] != "tests"} == set()


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (DOCSTRING, '    """Of the next Draft; 0 for plain decoding."""'),
        (DOCSTRING, 'r"""Without a noun."""'),
        (COMMENT, "depth: int  \x23 of the next Draft"),
        (PROTO_COMMENT, "uint32 depth = 1;  // Of the next Draft"),
        (PAGE, "After so many tokens it ends."),
        (STAND_IN, "Launches a step before the one before it."),
        (STAND_IN, "Returns the drafted ones."),
        (STAND_IN, "# trial, if the load has doubled since the last one"),
    ],
)
def test_rule_sees_a_line_without_its_noun(rule: re.Pattern[str], line: str) -> None:
    assert rule.search(line)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (DOCSTRING, '    """Depth of the next Draft; 0 for plain decoding."""'),
        (COMMENT, "depth: int  # tokens of the next Draft"),
        (PAGE, "After 64 tokens it ends."),
        (STAND_IN, "Depths that one reason decides; a table of one line or more."),
    ],
)
def test_rule_accepts_a_line_with_its_noun(rule: re.Pattern[str], line: str) -> None:
    assert not rule.search(line)


def test_pronoun_is_seen_at_the_beginning_of_a_name_alone() -> None:
    assert PRONOUN.match("test_it_waits_for_a_verdict")
    assert not PRONOUN.match("test_item_that_waits_is_dropped")
