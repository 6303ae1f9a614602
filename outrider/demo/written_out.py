"""Demo target at a realistic cost: the small trained target, inflated once into the user's cache folder.

A target of 4 M parameters costs hardly more than its draft, so drafting cannot pay. The written-out target
computes the same function with 190 M parameters. The folder's name contains a hash of source and recipe, so
another release writes a folder of its own.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from functools import cache
from pathlib import Path

from outrider.demo.prompts import DEMO

SOURCE, HEADS = DEMO / "target", DEMO.parent / "drafters"
RECIPE = *(Path(__file__).with_name(f"{name}.py") for name in ("inflation", "head_inflation")), Path(__file__)
SIZES = {"hidden": 1024, "layers": 16, "intermediate": 2816, "heads": 32, "kv_heads": 16}
BYTES = 420_000_000  # disk space: bfloat16 weights of 190 M parameters and of the heads, plus 5 %
TOLD = "the small trained demo target (4 M parameters), written out at a realistic cost (190 M)"


@cache
def target() -> Path:
    """Returns the checkpoint's folder, below XDG_CACHE_HOME or ``~/.cache``, whether or not it exists."""
    parent = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(parent) / "outrider" / f"demo-190M-{_digest()}" / "target"


def is_written_out(model: str) -> bool:
    """Whether the model is the written-out demo target of this release, in any cache folder."""
    return Path(model).parts[-2:] == target().parts[-2:]


def write_out(model: str) -> None:
    """Writes the demo target if ``model`` is its folder and does not exist yet; otherwise a no-op.

    The write is atomic. If two processes start at once, the second process waits for the first process.

    Raises:
        OSError: the folder cannot be written, or its disk has no room; the message says what to do.
    """
    if not is_written_out(model) or Path(model).is_dir():
        return
    folder = Path(model).parent
    try:
        _write(folder)
    except Exception as error:  # safetensors has an error of its own for a full disk
        raise OSError(
            f"the demo target cannot be written to {folder} ({error}): it needs {BYTES / 1e6:.0f} MB there."
            " Let XDG_CACHE_HOME name a folder that has room and can be written to, or serve"
            " target=demo-small, which needs no folder"
        ) from error


def _write(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a start that was interrupted
        if (free := shutil.disk_usage(folder.parent).free) < BYTES:
            raise OSError(f"{free / 1e6:.0f} MB are free")
        started = time.perf_counter()
        _report(f"{TOLD}: it is written to {folder}, once")
        import torch  # a process that only looks for the folder, such as `serve run`, does not need it

        from outrider.demo.head_inflation import inflate_heads
        from outrider.demo.inflation import inflate

        # The source is bfloat16 too, and a norm's weight is halved: nothing is rounded.
        inflate(SOURCE, partial / "target", torch.bfloat16, **SIZES)
        inflate_heads(HEADS, partial, SOURCE, partial / "target")
        os.rename(partial, folder)
        _report(f"the demo target is written, in {time.perf_counter() - started:.1f} s")


def _report(what: str) -> None:
    print(f"outrider: {what}", file=sys.stderr, flush=True)


def _digest() -> str:
    """Returns a hash of source and recipe."""
    digest = hashlib.sha256()
    heads = (file for file in sorted(HEADS.rglob("*")) if file.is_file())
    for file in (*sorted(SOURCE.iterdir()), *heads, *RECIPE):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
