"""Imports point downwards between packages, folders and files, and a process loads only what it uses."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Floors: each package, and the packages that it may import.
MAY_IMPORT = {
    "outrider.decoding": {"outrider.learning"},
    "outrider.drafters": {"outrider.decoding", "outrider.learning"},
    "outrider.pace": {"outrider.decoding", "outrider.learning", "outrider.drafters"},
    "outrider.learning": set(),
    "outrider.receipts": {"outrider.decoding", "outrider.learning"},
    "outrider.telemetry": set(),
    "outrider.demo": set(),
    "protos": {"outrider.decoding", "outrider.learning", "outrider.drafters", "outrider.pace"},
    "outrider.engine": {"outrider.decoding", "outrider.learning", "outrider.drafters", "outrider.pace"},
    "outrider.client": {"outrider.learning", "protos"},
    "actors": {
        "outrider.decoding",
        "outrider.demo",
        "outrider.learning",
        "outrider.drafters",
        "outrider.engine",
        "outrider.pace",
        "outrider.receipts",
        "outrider.telemetry",
        "protos",
    },
    "gateway": {
        "outrider.decoding",
        "outrider.learning",
        "outrider.drafters",
        "outrider.pace",
        "outrider.receipts",
        "outrider.telemetry",
        "protos",
    },
}
MAY_IMPORT["cluster"] = {*MAY_IMPORT} - {"outrider.client"}
MAY_IMPORT["outrider.ray"] = {*MAY_IMPORT} - {"outrider.client"}
MAY_IMPORT["workshop"] = {*MAY_IMPORT} - {"outrider.client"}
MAY_IMPORT["outrider.cli"] = {*MAY_IMPORT}
MAY_IMPORT["bench"] = {*MAY_IMPORT}
FILES = sorted(
    path.relative_to(ROOT)
    for package in MAY_IMPORT
    for path in (ROOT / package.replace(".", "/")).rglob("*.py")
)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


@cache
def imports_of(path: Path) -> set[str]:
    return imported((ROOT / path).read_text())


def imported(source: str) -> set[str]:
    """Everything that a module imports, at any depth of its code and for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(name: str) -> str | None:
    """Returns the package of MAY_IMPORT that a module belongs to."""
    return next((package for package in MAY_IMPORT if f"{name}.".startswith(f"{package}.")), None)


def packages_above(path: Path) -> set[str]:
    """Returns the packages that a file imports and must not import."""
    package = package_of(module_of(path))
    assert package is not None
    packages = {package_of(name) for name in imports_of(path)} - {None, package}
    return {above for above in packages if above and above not in MAY_IMPORT[package]}


def test_imports_point_downwards() -> None:
    assert {str(path): above for path in FILES if (above := packages_above(path))} == {}


def modules_imported(path: Path) -> set[str]:
    """Returns the imported modules of the product; for ``from package import name`` the module ``name``."""
    found = set()
    for name in imports_of(path):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module_of(path)}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the names along one circle of a graph; none if it has no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [*error.args[1]]
    return []


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the arrows between what lies side by side in a folder: its own folders and its files.

    graph: for each module the modules that it imports.
    """
    arrows = defaultdict(set)
    for importer, others in graph.items():
        for other in others:
            above, below = importer.split("."), other.split(".")
            depth = next((i for i, pair in enumerate(zip(above, below, strict=False)) if len({*pair}) > 1), 0)
            if depth:  # the floors order what lies outermost
                arrows[".".join(above[: depth + 1])].add(".".join(below[: depth + 1]))
    return dict(arrows)


GRAPH = {module_of(path): modules_imported(path) for path in FILES}


def test_modules_import_in_no_circle() -> None:
    assert circle(GRAPH) == []


def test_floors_form_no_circle() -> None:
    assert circle(MAY_IMPORT) == []


def test_folders_import_in_no_circle() -> None:
    assert circle(folder_graph(GRAPH)) == []


def test_folder_graph_shows_an_upward_import() -> None:
    """Four modules without a circle lie in two folders that import each other."""
    graph = {"room.low.one": {"room.high.two"}, "room.high.three": {"room.low.four"}}
    assert circle(graph) == []
    assert {*circle(folder_graph(graph))} == {"room.low", "room.high"}


def packages_outside(path: Path) -> set[str]:
    """Returns the outermost packages that a file imports."""
    return {name.split(".")[0] for name in imports_of(path)}


def test_packages_of_the_workshop_are_imported_by_nothing_else() -> None:
    """A server installs without the extra ``workshop``."""
    tools = [Path(name) for name in ("workshop", "bench", "outrider/cli")]
    server = [path for path in FILES if not any(path.is_relative_to(tool) for tool in tools)]
    extra = {"httpx", "matplotlib", "peft"}
    assert {str(path): used for path in server if (used := packages_outside(path) & extra)} == {}


@pytest.mark.parametrize("source", ["import outrider.engine.cache", "from actors.worker import Worker"])
def test_imported_finds_a_late_import(source: str) -> None:
    names = imported(f"def late():\n    {source}")
    assert {package_of(name) for name in names} & {"outrider.engine", "actors"}


@pytest.mark.parametrize(
    "package", ["outrider/decoding", "outrider/engine", "workshop/training", "workshop/demo"]
)
def test_packages_below_the_workers_import_no_ray(package: str) -> None:
    files = [path for path in FILES if path.is_relative_to(package)]
    assert files
    assert not [path for path in files if "ray" in packages_outside(path)]


def loaded_by(module: str, watched: set[str]) -> str:
    """Returns the watched modules that an import of the module loads."""
    check = f"import sys, {module} as _; print(*sorted({watched} & {{*sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_command_line_loads_no_command() -> None:
    watched = {"torch", "ray", "transformers", "workshop", "outrider.cli.advise_command"}
    assert loaded_by("outrider.cli.command_line", watched) == ""


HEAVY = {"torch", "transformers", "sympy", "scipy", "matplotlib", "pandas"}


@pytest.mark.parametrize(
    ("module", "watched"),
    [
        # The process of `serve run`; it imports what names the workers, and what Serve's controller imports.
        ("cluster.application", HEAVY),
        ("gateway.api.proxy", HEAVY | {"tokenizers", "outrider.engine"}),  # in Serve's proxies
        ("gateway.deployment", HEAVY | {"outrider.engine", "actors", "cluster"}),
        ("cluster.preflight", HEAVY | {"ray", "fastapi"}),
        ("outrider.client.client", HEAVY | {"ray", "fastapi", "numpy", "pydantic"}),
        ("outrider.client.async_client", HEAVY | {"ray", "fastapi", "numpy", "pydantic"}),
        ("workshop.checking.check", HEAVY | {"ray", "fastapi", "grpc"}),
    ],
)
def test_process_loads_only_what_it_uses(module: str, watched: set[str]) -> None:
    assert loaded_by(module, watched) == ""


TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))


def test_modules_of_tests_import_no_other_module_of_tests() -> None:
    others = {
        str(path): [name for name in imports_of(path) if re.match(r"tests\..*\b(test_|conftest)", name)]
        for path in TESTS
    }
    assert {path: names for path, names in others.items() if names} == {}


def test_bench_is_imported_by_its_own_tests_alone() -> None:
    own = Path("tests/bench"), Path("tests/test_layers.py")
    others = [path for path in TESTS if not any(path.is_relative_to(each) for each in own)]
    assert [str(path) for path in others if "bench" in packages_outside(path)] == []
