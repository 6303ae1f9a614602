"""Name of this machine's processor, to be recorded with measured times."""

import platform
from pathlib import Path


def processor_name() -> str:
    """Returns the processor's name from /proc/cpuinfo, or else from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
