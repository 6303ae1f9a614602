"""Amounts of memory in human-readable form."""

import re

UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Reads 80GB, 24GiB, 512 MB or plain bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(\w*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is no amount of memory: 80GB, 24GiB and bytes are")
    return int(float(match[1]) * UNITS[match[2].upper()])
