"""Compiled functions of functions.cpp, which compute a forward pass on a CPU in float32.

Every row's result is the same, bit for bit, alone and beside others, and with any number of threads. That is
also why matrix products are not a library's: in what order oneDNN and MKL add up may depend on the number of
rows. Nor do they read memory as fast as it is where rows are few.
"""

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

import torch

# By the name that torch has for what this processor can do. pyproject.toml says how each is compiled.
INSTRUCTION_SETS = {"AVX512": "avx512", "AVX2": "avx2"}


def compiled() -> ctypes.CDLL | None:
    """Returns the functions of functions.cpp; None: this machine cannot have them."""
    library = found()
    return None if isinstance(library, str) else library


def functions() -> ctypes.CDLL:
    """The functions of functions.cpp.

    Raises:
        RuntimeError: this machine cannot have them; the message says what is missing.
    """
    library = found()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


@cache
def found() -> ctypes.CDLL | str:
    """Returns the library, or what is missing for it."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in INSTRUCTION_SETS:
        needed = " or ".join(INSTRUCTION_SETS)
        return (
            f"the compiled functions need a processor with {needed}, and torch says {capability} of this one"
        )
    path = Path(__file__).with_name(f"{INSTRUCTION_SETS[capability]}{sysconfig.get_config_var('EXT_SUFFIX')}")
    if not path.exists():
        return f"{path.name} is missing, which an installation compiles if there is a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # this build of torch brings no OpenMP that fits
        return f"{path.name} cannot be loaded: {error}"
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    takes = {
        "panel_width": [],
        "multiply": [pointer, number, pointer, number, number, *[pointer] * 3, ctypes.c_int],
        "norm": [pointer, *[number] * 4, pointer, ctypes.c_float, pointer, number, ctypes.c_int],
        "rotate_and_store": [pointer, *[number] * 4, *[pointer] * 3, number, *[pointer] * 3, ctypes.c_int],
        "gate": [pointer, number, number, pointer, ctypes.c_int],
        "attend": [pointer, ctypes.c_int],
    }
    for function, types in takes.items():
        getattr(library, function).argtypes = types
        getattr(library, function).restype = None
    library.panel_width.restype = number
    return library
