"""Generated code in the repository matches the protos."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROTOS = ("protos/generation.proto", "protos/rounds.proto")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *PROTOS]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("name", ["generation", "rounds"])
@pytest.mark.parametrize("ending", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_generated_module_is_fresh(fresh: Path, name: str, ending: str) -> None:
    path = Path("protos") / f"{name}{ending}"
    assert (ROOT / path).read_text() == (fresh / path).read_text(), "run `make protos`"
