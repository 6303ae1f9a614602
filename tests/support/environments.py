"""Environments of other programs' own, made once and kept in .clients/."""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU_TORCH = "https://download.pytorch.org/whl/cpu"


def environment(name: str, *requirements: str, torch: bool = False) -> Path:
    """Its folder of programs. What is required is pinned, so a folder that is there is as it should be.

    torch: installs its CPU build first, or pip would fetch several GB of CUDA packages.
    """
    said = hashlib.sha256("\n".join([*requirements, str(torch)]).encode()).hexdigest()[:8]
    folder = ROOT / ".clients" / f"{name}-{said}"
    done = folder / "installed"
    if not done.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        if torch:
            _install(folder, "torch", "--index-url", CPU_TORCH)
        _install(folder, *requirements)
        done.touch()
    return folder / "bin"


def _install(folder: Path, *arguments: str) -> None:
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments], check=True)
