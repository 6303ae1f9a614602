"""Contents of a Ray cluster, asked by a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.patience import START_S


def left_in_ray(address: str) -> Any:
    """Returns the numbers of live actors by class, and of placement groups that hold resources by state."""
    return ask_ray(
        address,
        """
kinds = [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]
states = [group["state"] for group in ray.util.placement_group_table().values()]
answer = Counter(kinds) + Counter(state for state in states if state != "REMOVED")
""",
    )


def ask_ray(address: str, script: str) -> Any:
    """Runs a script in a process that is connected to a cluster, and returns the script's ``answer``."""
    before = """
import json, ray
from collections import Counter
from ray._private.state import actors
ray.init(namespace="serve", logging_level="ERROR")
"""
    process = subprocess.run(
        [sys.executable, "-c", f"{before}{script}print(json.dumps(answer))"],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        check=True,
        timeout=START_S,
    )
    return json.loads(process.stdout.splitlines()[-1])
