"""A GPU worker compiles its kernels wherever it runs: Triton is led to a folder that can be written to."""

import json
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from triton import knobs

from outrider.demo.prompts import DEMO
from outrider.engine.kernels.cache_folder import use_writable_cache_folder
from tests.support.simulated_cuda.install import needs_compiler

ROOT = Path(__file__).parents[3]
NOWHERE = "/dev/null/home"  # not even root can make a folder there


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, in an environment that names no cache and no home."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that what the test sets is taken away after it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", NOWHERE)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def own(temporary: Path) -> Path:
    return temporary / f"triton-{os.getuid()}"


def test_cache_folder_in_a_writable_home_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    use_writable_cache_folder()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_without_a_writable_home_kernels_are_kept_in_a_private_folder(temporary: Path) -> None:
    use_writable_cache_folder()
    assert Path(knobs.cache.dir) == own(temporary)
    assert own(temporary).stat().st_mode & 0o777 == 0o700


def test_cache_folder_of_an_unknown_user_is_temporary(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    use_writable_cache_folder()
    assert Path(knobs.cache.dir) == own(temporary)


def test_cache_folder_is_found_by_the_next_process(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_writable_cache_folder()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    use_writable_cache_folder()
    assert Path(knobs.cache.dir) == own(temporary)


def test_cache_folder_writable_by_others_is_not_taken(temporary: Path) -> None:
    own(temporary).mkdir()
    own(temporary).chmod(0o777)
    use_writable_cache_folder()
    kept = Path(knobs.cache.dir)
    assert kept != own(temporary)
    assert kept.parent == temporary
    assert kept.stat().st_mode & 0o777 == 0o700


def test_cache_folder_that_is_a_link_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    own(temporary).symlink_to(tmp_path / "theirs")
    use_writable_cache_folder()
    assert Path(knobs.cache.dir) != own(temporary)


def test_cache_folder_of_the_environment_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    use_writable_cache_folder()
    assert Path(knobs.cache.dir) == tmp_path / "kernels"


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_cache_folder_of_the_environment_without_write_access_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, NOWHERE)
    with pytest.raises(ValueError, match=f"{variable}='{NOWHERE}'.*give a folder"):
        use_writable_cache_folder()


@needs_compiler
@pytest.mark.slow
def test_engine_without_a_home_compiles_its_kernels(temporary: Path) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="needs triton with ptxas: pip install triton")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TMPDIR": str(temporary),
        "XDG_CACHE_HOME": str(temporary),  # cache of the simulated GPU
    }
    command = [sys.executable, "-m", "tests.support.ahead_of_time", str(DEMO / "target")]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    told = json.loads(run.stdout)
    assert Path(told["folder"]) == own(temporary)
    assert {"attend_tile", "_norm", "_gate"} <= set(told["kernels"])
