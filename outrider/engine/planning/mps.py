"""NVIDIA's MPS, with which the kernels of several processes run on a GPU at the same time."""

import errno
import os
import socket
import stat
from pathlib import Path

FOLDER = "CUDA_MPS_PIPE_DIRECTORY"  # variable by which CUDA finds the control daemon's pipe
USUAL_FOLDER = "/tmp/nvidia-mps"  # CUDA's default


def mps_runs() -> bool:
    """Whether the control daemon of MPS answers at its pipe, which CUDA opens too.

    Without MPS, processes take turns on the whole GPU.
    """
    pipe = Path(os.environ.get(FOLDER, USUAL_FOLDER)) / "control"
    try:
        if stat.S_ISSOCK(pipe.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
                asked.connect(str(pipe))
        else:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.EPROTOTYPE  # a daemon listens, but for another type of connection
    return True
