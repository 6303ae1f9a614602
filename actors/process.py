"""Process of a worker: it loads without collecting garbage, and ends itself if it is beyond repair."""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

logger = logging.getLogger(f"ray.serve.{__name__}")

LEFT = 1  # exit status


@contextmanager
def importing() -> Iterator[None]:
    """Pauses the garbage collector while modules are imported: collections would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Takes loaded objects out of collections; called when all is loaded.

    The collector would pass over them again and again, each time a quarter of a second without answers.
    """
    gc.collect()
    gc.freeze()


def leave(reason: str) -> NoReturn:
    """Ends this process at once: gateways choose other workers, and Serve starts a new process."""
    logger.critical("this process ends itself: %s", reason)
    logging.shutdown()
    os._exit(LEFT)
