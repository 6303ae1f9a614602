"""Each package imports only packages below it, and the gateway imports without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "decoding": set(),
    "telemetry": set(),
    "protos": {"decoding"},
    "engine": {"decoding"},
    "actors": {"decoding", "engine", "protos", "telemetry"},
    "gateway": {"decoding", "protos", "telemetry"},
    "cluster": {"actors", "client", "decoding", "engine", "gateway", "protos", "telemetry"},
    "client": {"protos"},
    "models": {"decoding", "engine"},
    "bench": {"actors", "decoding", "engine", "gateway", "models", "protos", "telemetry"},
}
FILES = sorted(path.relative_to(ROOT) for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imported_packages(source: str) -> set[str]:
    """The first names of everything that a module imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_downwards(path: Path) -> None:
    package = path.parts[0]
    above = imported_packages((ROOT / path).read_text()) & MAY_IMPORT.keys() - {package} - MAY_IMPORT[package]
    assert not above, f"{package} must not import {', '.join(sorted(above))}"


@pytest.mark.parametrize("source", ["import engine.cache", "from actors.worker import Worker"])
def test_an_import_that_points_upwards_is_seen(source: str) -> None:
    assert imported_packages(f"def late():\n    {source}") & {"engine", "actors"}


@pytest.mark.parametrize("package", ["decoding", "engine", "models"])
def test_nothing_below_the_workers_imports_ray(package: str) -> None:
    sources = [(ROOT / path).read_text() for path in FILES if path.parts[0] == package]
    assert sources
    assert not any("ray" in imported_packages(source) for source in sources)


def loaded_by(module: str, watched: set[str]) -> str:
    """Those of the watched modules that importing one loads."""
    check = f"import sys, {module} as _; print(*sorted({watched} & {{*sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_the_gateway_loads_no_torch() -> None:
    assert loaded_by("gateway.deployment", {"torch", "engine"}) == ""


def test_the_command_line_loads_only_what_a_command_needs() -> None:
    assert loaded_by("cluster.command_line", {"torch", "ray", "transformers"}) == ""


HEAVY = {"torch", "transformers", "sympy", "scipy", "matplotlib", "pandas"}


@pytest.mark.parametrize(
    ("module", "watched"),
    [
        ("cluster.application", HEAVY),  # the process of `serve run`
        ("actors.worker", HEAVY),  # which names the workers' classes
        ("cluster.start", HEAVY),
        ("cluster.autoscaling", HEAVY),  # in Serve's controller
        ("gateway.proxy", HEAVY | {"tokenizers", "engine"}),  # in Serve's proxies
        ("gateway.deployment", HEAVY | {"engine", "actors", "cluster"}),
        ("cluster.preflight", HEAVY | {"ray", "fastapi"}),
        ("engine.engine", {"ray", "grpc", "fastapi", "matplotlib", "pandas"}),
        ("client.generation", HEAVY | {"ray", "fastapi", "numpy", "pydantic"}),
    ],
)
def test_a_process_loads_only_what_it_uses(module: str, watched: set[str]) -> None:
    assert loaded_by(module, watched) == ""
