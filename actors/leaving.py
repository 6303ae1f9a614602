"""Ends the process of a worker or a rank if something in it is beyond repair."""

import logging
import os
from typing import NoReturn

logger = logging.getLogger("ray.serve")

LEFT = 1  # exit status


def leave(reason: str) -> NoReturn:
    """Ends this process at once: its connections break, gateways go elsewhere, Serve starts another."""
    logger.critical("this process ends itself: %s", reason)
    logging.shutdown()
    os._exit(LEFT)
