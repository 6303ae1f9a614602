"""Name of this machine's processor, without which a measured time says little."""

import platform
from pathlib import Path


def processor_name() -> str:
    """Returns what Linux says of the processor; elsewhere what Python says."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
