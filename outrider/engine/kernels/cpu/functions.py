"""Loads the compiled functions of functions.cpp, which compute a forward pass on a CPU.

A row's result has the same bits alone and beside other rows, and with any number of threads. Matrix products
are our own for that reason: in oneDNN and MKL the order of a sum may depend on the number of rows. With few
rows these libraries also use less than the full memory bandwidth.
"""

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

import torch

# Libraries by torch's name of a CPU's instruction set. pyproject.toml says how each is compiled.
INSTRUCTION_SETS = {"AVX512": "avx512", "AVX2": "avx2"}


def compiled() -> ctypes.CDLL | None:
    """Returns the library of functions.cpp; None if this machine cannot load it."""
    library = found()
    return None if isinstance(library, str) else library


def functions() -> ctypes.CDLL:
    """Returns the library of functions.cpp.

    Raises:
        RuntimeError: this machine cannot load it; the message says what is missing.
    """
    library = found()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


@cache
def found() -> ctypes.CDLL | str:
    """Returns the library of functions.cpp, or a sentence that says what is missing."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in INSTRUCTION_SETS:
        needed = " or ".join(INSTRUCTION_SETS)
        return (
            f"the compiled functions need a processor with {needed}, and torch says {capability} of this one"
        )
    path = Path(__file__).with_name(f"{INSTRUCTION_SETS[capability]}{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        return f"{path.name} is missing; an installation compiles it if there is a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # builds of torch may lack a compatible OpenMP
        return f"{path.name} cannot be loaded: {error}"
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    takes = {
        "panel_width": [],
        "multiply": [pointer, number, pointer, number, number, *[pointer] * 3, ctypes.c_int],
        "norm": [pointer, *[number] * 4, pointer, ctypes.c_float, pointer, number, ctypes.c_int],
        "rotate_and_store": [pointer, *[number] * 4, *[pointer] * 3, number, *[pointer] * 3, ctypes.c_int],
        "gate": [pointer, number, number, pointer, ctypes.c_int],
        "attend_float32": [pointer, ctypes.c_int],
        "attend_bfloat16": [pointer, ctypes.c_int],
    }
    try:
        for name, types in takes.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
    except AttributeError as error:
        return f"{path.name} is older than functions.cpp; an installation compiles it again: {error}"
    library.panel_width.restype = number
    return library
