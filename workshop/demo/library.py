"""Documents from the running interpreter's standard library: its sources as code, its docstrings as prose."""

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# tests and conversion tables are large and repetitive
SKIPPED = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "lib-dynload",
    "__pycache__",
    "ensurepip",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHORTEST_CHARACTERS = 200


def source_files() -> list[Path]:
    """Returns the Python files of the standard library in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(files) if not SKIPPED & set(path.parts)]


def code_documents(source: str) -> list[str]:
    """Returns the top-level blocks of a source file, between two blank lines."""
    blocks = (block.strip("\n") for block in source.split("\n\n\n"))
    return [block for block in blocks if len(block) >= SHORTEST_CHARACTERS]


def strings(tree: ast.Module) -> Iterator[str]:
    """Yields the docstrings of a module, and the strings in its dictionaries (pydoc's topics)."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield inspect.cleandoc(value.value)


def prose_documents(source: str) -> list[str]:
    """Returns the longer texts of a source file that contain no interpreter session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        tree = ast.parse(source)
    texts = map(str.strip, strings(tree))
    return [text for text in texts if len(text) >= SHORTEST_CHARACTERS and ">>>" not in text]
