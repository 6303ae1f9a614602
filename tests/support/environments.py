"""Environments of other programs' own, made once and kept in .clients/."""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = f"torch=={version('torch').partition('+')[0]}"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
# No client needs these, and those of PyPI fit another build of torch.
OF_OTHER_BUILDS = ("torchvision", "torchaudio", "torchcodec")


def environment(name: str, *requirements: str) -> Path:
    """Its folder of programs. What is required is pinned, so a folder that is there is as it should be.

    requirements: where TORCH is one, its build for processors goes in first, or pip would fetch several GB of
        CUDA packages.
    """
    said = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:8]
    folder = ROOT / ".clients" / f"{name}-{said}"
    done = folder / "installed"
    if not done.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if TORCH in requirements:
            _pip(folder, "install", "--no-deps", "--index-url", CPU_BUILDS, TORCH)
        _pip(folder, "install", *requirements)
        if TORCH in requirements:
            _pip(folder, "uninstall", "-y", *OF_OTHER_BUILDS)
        done.touch()
    return folder / "bin"


def _pip(folder: Path, *arguments: str) -> None:
    subprocess.run([folder / "bin" / "python", "-m", "pip", "--quiet", *arguments], check=True)
