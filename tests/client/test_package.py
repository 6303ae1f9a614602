"""``from outrider import Client`` loads gRPC; ``import outrider`` alone does not."""

import subprocess
import sys

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
