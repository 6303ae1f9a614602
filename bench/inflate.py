"""Command that writes a Llama checkpoint of the same function at a larger cost.

    python -m bench inflate SOURCE DESTINATION --hidden 1024 --layers 16 --intermediate 2816 \
        --heads 32 --kv-heads 16
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from outrider.demo.inflation import InflationError, Size, inflate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench inflate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("source", type=Path, help="folder of a Llama checkpoint")
    parser.add_argument("destination", type=Path, help="folder to be made")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    for field in fields(Size):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=argparse.SUPPRESS, help="as in the source if left out")
    sizes = vars(parser.parse_args(arguments))
    source, destination, dtype = sizes.pop("source"), sizes.pop("destination"), DTYPES[sizes.pop("dtype")]
    try:
        parameters = inflate(source, destination, dtype, **sizes)
    except (InflationError, FileExistsError) as error:
        parser.error(str(error))
    print(f"{destination}: {parameters / 1e6:.1f} M parameters")
