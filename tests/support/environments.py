"""Virtual environments for other programs, created once and kept in .clients/."""

import hashlib
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = f"torch=={version('torch').partition('+')[0]}"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# No client needs these, and PyPI's versions need another build of torch.
OF_OTHER_BUILDS = ("torchvision", "torchaudio", "torchcodec")
UNREACHABLE = "connection broken by"  # part of pip's message if an index does not answer


def environment(name: str, *requirements: str) -> Path:
    """Returns the folder of an environment's programs. An existing folder is valid: versions are pinned.

    The test is skipped if the package index is unreachable.

    requirements: if TORCH is among them, its CPU build is installed first. Otherwise pip would download
        several GB of CUDA packages.
    """
    said = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:8]
    folder = ROOT / ".clients" / f"{name}-{said}"
    done = folder / "installed"
    if not done.is_file():
        began = time.monotonic()
        _tell(f"making the environment of {name}, once: {', '.join(requirements)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if TORCH in requirements:
            _pip(folder, "install", "--no-deps", "--index-url", CPU_BUILDS, TORCH)
        _pip(folder, "install", *requirements)
        if TORCH in requirements:
            _pip(folder, "uninstall", "-y", *OF_OTHER_BUILDS)
        done.touch()
        _tell(f"the environment of {name} took {time.monotonic() - began:.0f} s")
    return folder / "bin"


def _pip(folder: Path, *arguments: str) -> None:
    """Runs pip, and shows its output if it fails."""
    pip = (folder / "bin" / "python", "-m", "pip", "--quiet", "--retries", "1")
    ran = subprocess.run(
        [*pip, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ran.returncode and UNREACHABLE in ran.stdout:
        pytest.skip(f"packages cannot be fetched: {ran.stdout[ran.stdout.index(UNREACHABLE) :][:200]}")
    assert ran.returncode == 0, ran.stdout[-4000:]


def _tell(words: str) -> None:
    """Prints in spite of pytest's capture, which would show nothing for minutes."""
    print(f"\n{words}", file=sys.__stderr__, flush=True)
