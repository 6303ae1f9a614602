"""Compiles the kernels of the choice for GPUs that need not be there; prints what ptxas says, as JSON.

A process of its own, since in that of the tests Triton may interpret: TRITON_INTERPRET=0 has to be set.
"""

import json
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from outrider.engine.kernels import choice

TYPES = {
    "logits": "*bf16",
    "row_stride": "i32",
    "allowed": "*i32",
    "integers": "*i64",
    "numbers": "*fp64",
    "num_rows": "i32",
    "vocab_size": "i32",
    "statistics": "*fp32",
    "block_maxima": "*i64",
    "candidates": "*i64",
    "counts": "*i32",
    "ranks": "i32",
    "ranked": "*i32",
    "are_sound": "*i1",
}
CONSTANTS = {
    "CAPACITY": choice.CAPACITY,
    "ID_BITS": 17,
    "CHUNK": choice.CHUNK,
    "BLOCK": choice.BLOCK,
    "CHUNKS": 32,
    "CHUNKS_PADDED": 32,
}
ALIGNED = {"row_stride", "vocab_size", *(name for name, kind in TYPES.items() if kind.startswith("*"))}


def compiled(kernel: Any, capability: int) -> dict[str, int]:
    """Registers of a thread and bytes that it spills; capability is 90 for 9.0."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: TYPES.get(name, "constexpr") for name in names},
        constexprs={name: CONSTANTS[name] for name in names if name in CONSTANTS},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in ALIGNED},
    )
    options = {"num_warps": choice.WARPS, "enable_fp_fusion": False}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(found.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (\w+)", found.asm["ptx"])
        assert arch is not None
        command = [get_ptxas(capability).path, "-v", f"-arch={arch[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return {"registers": int(registers), "spilled": spilled}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{kernel.__name__} sm_{capability}": compiled(kernel, capability)
                for kernel in (choice._scan, choice._collect, choice._choose)
                for capability in (89, 90)
            }
        )
    )
