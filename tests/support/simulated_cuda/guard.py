"""Builds and loads guard.cpp, which tells torch's C++ code the current CUDA device."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("guard.cpp")
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which("g++")
MISSING = "the simulated GPU needs a C++ compiler: install g++ (apt-get install g++)"


@cache
def load_guard() -> ctypes.CDLL:
    """Returns the guard, which is compiled once per version of its source and of torch."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = caches / "outrider" / f"simulated_cuda_{version}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _compile(library)
    return ctypes.CDLL(str(library))


def _compile(library: Path) -> None:
    assert COMPILER is not None, MISSING
    built = library.with_suffix(f".{os.getpid()}")  # another process may build it at the same time
    libraries = TORCH / "lib"
    subprocess.run(
        [
            COMPILER,
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{TORCH / 'include'}",
            str(SOURCE),
            "-o",
            str(built),
            f"-L{libraries}",
            f"-Wl,-rpath,{libraries}",
            "-lc10",
        ],
        check=True,
    )
    built.replace(library)
