"""Debug logging of packages that a developer selects."""

import logging
import os

ROOMS = "OUTRIDER_DEBUG"  # environment variable: names of packages or modules, separated by commas
SERVE = "ray.serve"  # Serve's logger: loggers below it write into the log of their replica


def show_debug_lines() -> None:
    """Turns on debug logging of the packages that the environment names; called once in each process."""
    for room in sorted(filter(None, map(str.strip, os.environ.get(ROOMS, "").split(",")))):
        for logger in (logging.getLogger(room), logging.getLogger(f"{SERVE}.{room}")):
            logger.setLevel(logging.DEBUG)
            if not logger.hasHandlers():
                handler = logging.StreamHandler()
                handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
                logger.addHandler(handler)
