"""Folder in which Triton caches its compiled kernels.

The default is ``~/.triton``, and Triton fails at the first launch if it cannot write there. Containers often
have a read-only root file system, and a user without a home.
"""

import os
import stat
import tempfile
from pathlib import Path

GIVEN = "TRITON_CACHE_DIR"
HOME = "TRITON_HOME"  # parent of the folder `.triton`, if the cache itself is not given


def use_writable_cache_folder() -> None:
    """Points Triton, in this process and its children, to a folder that this process can write to.

    TRITON_CACHE_DIR or TRITON_HOME names the folder. Otherwise it is in the user's home, or if that is not
    writable, a private folder among the temporary files. Triton loads code from there, so other users must
    not be able to write to it.

    Raises:
        ValueError: the folder that the environment names cannot be written to.
    """
    if folder := os.environ.get(GIVEN):
        _check(GIVEN, folder, Path(folder))
    elif home := os.environ.get(HOME):
        _check(HOME, home, Path(home) / ".triton" / "cache")
    elif _why_not_writable(_in_home()) is not None:
        os.environ[GIVEN] = str(_in_temporary_files())


def _check(variable: str, value: str, folder: Path) -> None:
    if (reason := _why_not_writable(folder)) is not None:
        raise ValueError(
            f"{variable}={value!r}: kernels cannot be kept in {folder} ({reason}); give a folder that this "
            "process can write to"
        )


def _in_home() -> Path:
    return Path(os.path.expanduser("~")) / ".triton" / "cache"


def _in_temporary_files() -> Path:
    """Returns a folder that outlives this process, so that later processes find its kernels."""
    folder = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    if is_private and _why_not_writable(folder) is None:
        return folder
    return Path(tempfile.mkdtemp(prefix="triton-"))


def _why_not_writable(folder: Path) -> str | None:
    if not folder.is_absolute():
        return "the user has no home folder"  # "~" would be created in the working directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return str(error)
