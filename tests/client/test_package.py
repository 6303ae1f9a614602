"""``from outrider import Client`` loads gRPC; ``import outrider`` alone does not."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import outrider
from outrider.client.client import Client


def loads_grpc(statement: str) -> bool:
    """Returns whether a new interpreter that runs the code imports gRPC."""
    check = f"{statement}; import sys; print('grpc' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    return run.stdout.strip() == "True"


def test_package_has_the_client():
    from outrider import Client as Named

    assert Named is Client


@pytest.mark.parametrize("name", outrider.__all__)
def test_package_has_all_that_it_names(name: str):
    assert getattr(outrider, name).__name__ == name


def test_package_names_a_missing_attribute():
    with pytest.raises(AttributeError, match="'Server'"):
        _ = outrider.Server


@pytest.mark.parametrize("module", ["outrider", "outrider.decoding.draft", "outrider.pace.controller"])
def test_package_without_its_client_loads_no_grpc(module: str):
    assert not loads_grpc(f"import {module}")


def test_package_with_its_client_loads_grpc():
    assert loads_grpc("from outrider import Client")


EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
OTHERWISE_NAMED = {"huggingface-hub": "huggingface_hub"}
COMMANDS = ("generate", "race", "top", "trace", "plan", "advise", "distil", "check")


def modules_of(requirements: list[str]) -> set[str]:
    """Returns the top-level modules of distributions, but for those that grpc imports if they are there."""
    names = {re.split(r"[\[<>=]", each)[0] for each in requirements} - {"grpcio-health-checking"}
    return {OTHERWISE_NAMED.get(name, name.partition("-")[0]) for name in names}


def test_install_without_extras_has_all_that_clients_and_the_start_of_commands_import():
    of_server = modules_of(EXTRAS["optional-dependencies"]["server"])
    assert {"torch", "ray", "transformers", "numpy", "msgspec", "opentelemetry"} <= of_server
    imports = "; ".join(f"import outrider.cli.{name}_command" for name in COMMANDS)
    check = (
        f"import outrider.client.async_client; {imports}; import sys; print(*{of_server} & {{*sys.modules}})"
    )
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_install_to_check_services_has_no_engine():
    extras = EXTRAS["optional-dependencies"]
    absent = modules_of(extras["server"]) - modules_of(extras["check"])
    assert {"torch", "ray", "transformers", "tokenizers"} <= absent
    imports = "import workshop.checking.check, workshop.checking.deployment, workshop.checking.markdown"
    check = f"{imports}; import sys; print(*{absent} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_install_extras_build_upon_the_server():
    extras = EXTRAS["optional-dependencies"]
    assert extras["client"] == []
    assert "outrider[check,server]" in extras["workshop"]
    assert "outrider[server]" in extras["dev"]
