"""Each package imports only packages below it, and the gateway imports without torch."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "outrider.decoding": set(),
    "outrider.drafters": {"outrider.decoding"},
    "outrider.pace": {"outrider.decoding", "outrider.drafters"},
    "outrider.telemetry": set(),
    "outrider.traffic": set(),
    "protos": {"outrider.decoding", "outrider.drafters", "outrider.pace"},
    "outrider.engine": {"outrider.decoding", "outrider.drafters", "outrider.pace"},
    "outrider.client": {"protos"},
    "workshop.checking": {"outrider.decoding"},
    "workshop.training": {"outrider.decoding", "outrider.engine"},
    "outrider.demo": set(),
    "workshop.demo": {"outrider.demo", "outrider.decoding", "outrider.engine", "workshop.training"},
    "actors": {
        "outrider.decoding",
        "outrider.drafters",
        "outrider.engine",
        "outrider.pace",
        "outrider.telemetry",
        "protos",
    },
    "gateway": {
        "outrider.decoding",
        "outrider.drafters",
        "outrider.pace",
        "outrider.telemetry",
        "outrider.traffic",
        "protos",
    },
}
NOT_SERVED = {"outrider.demo", "workshop.demo", "workshop.training", "outrider.client", "workshop.checking"}
MAY_IMPORT["cluster"] = {*MAY_IMPORT} - NOT_SERVED
MAY_IMPORT["workshop.advice"] = {*MAY_IMPORT} - NOT_SERVED
MAY_IMPORT["workshop.distillation"] = {
    "workshop.advice",
    "outrider.decoding",
    "outrider.engine",
    "outrider.traffic",
    "workshop.training",
}
MAY_IMPORT["outrider.cli"] = {*MAY_IMPORT} - {"workshop.demo"}
MAY_IMPORT["bench"] = {*MAY_IMPORT}
FILES = sorted(
    path.relative_to(ROOT)
    for package in MAY_IMPORT
    for path in (ROOT / package.replace(".", "/")).rglob("*.py")
)


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


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
    """The one of ours that this belongs to."""
    return next((package for package in MAY_IMPORT if f"{name}.".startswith(f"{package}.")), None)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_downwards(path: Path) -> None:
    package = package_of(module_of(path))
    assert package is not None
    packages = {package_of(name) for name in imported((ROOT / path).read_text())}
    above = packages - {None, package} - MAY_IMPORT[package]
    assert not above, f"{package} must not import {', '.join(sorted(filter(None, above)))}"


def modules_imported(path: Path) -> set[str]:
    """Those of ours; of ``from package import name`` the module ``name`` where it is one."""
    found = set()
    for name in imported((ROOT / path).read_text()):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", module_of(path)}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {module_of(path): modules_imported(path) for path in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("source", ["import outrider.engine.cache", "from actors.worker import Worker"])
def test_an_import_that_points_upwards_is_seen(source: str) -> None:
    names = imported(f"def late():\n    {source}")
    assert {package_of(name) for name in names} & {"outrider.engine", "actors"}


@pytest.mark.parametrize(
    "package", ["outrider/decoding", "outrider/engine", "workshop/training", "workshop/demo"]
)
def test_nothing_below_the_workers_imports_ray(package: str) -> None:
    sources = [(ROOT / path).read_text() for path in FILES if str(path).startswith(package)]
    assert sources
    assert not any(name.split(".")[0] == "ray" for source in sources for name in imported(source))


def loaded_by(module: str, watched: set[str]) -> str:
    """Those of the watched modules that importing one loads."""
    check = f"import sys, {module} as _; print(*sorted({watched} & {{*sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_gateway_loads_no_torch() -> None:
    assert loaded_by("gateway.deployment", {"torch", "outrider.engine"}) == ""


def test_the_command_line_loads_only_what_a_command_needs() -> None:
    assert loaded_by("outrider.cli.command_line", {"torch", "ray", "transformers"}) == ""


HEAVY = {"torch", "transformers", "sympy", "scipy", "matplotlib", "pandas"}


@pytest.mark.parametrize(
    ("module", "watched"),
    [
        ("cluster.application", HEAVY),  # the process of `serve run`
        ("actors.worker", HEAVY),  # which names the workers' classes
        ("cluster.start", HEAVY),
        ("cluster.autoscaling", HEAVY),  # in Serve's controller
        ("gateway.api.proxy", HEAVY | {"tokenizers", "outrider.engine"}),  # in Serve's proxies
        ("gateway.deployment", HEAVY | {"outrider.engine", "actors", "cluster"}),
        ("cluster.preflight", HEAVY | {"ray", "fastapi"}),
        ("outrider.engine.loop.engine", {"ray", "grpc", "fastapi", "matplotlib", "pandas"}),
        ("outrider.client.client", HEAVY | {"ray", "fastapi", "numpy", "pydantic"}),
        ("workshop.checking.check", HEAVY | {"ray", "fastapi", "grpc"}),
    ],
)
def test_a_process_loads_only_what_it_uses(module: str, watched: set[str]) -> None:
    assert loaded_by(module, watched) == ""


TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("path", TESTS, ids=str)
def test_what_tests_share_lies_in_support(path: Path) -> None:
    """No test module imports another, and only the tests of bench import bench."""
    names = imported((ROOT / path).read_text())
    shared = {name for name in names if name.startswith("tests.")}
    assert not {name for name in shared if ".test_" in name or ".conftest" in name}
    if path.parts[1] not in ("bench", "test_layers.py"):
        assert not {name for name in names if name.split(".")[0] == "bench"}
