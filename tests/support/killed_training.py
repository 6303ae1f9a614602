"""Training that ends at a step as if it were killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from workshop.training.loop import Training


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Context in which a training ends before a step. Fails if the training does not reach the step."""

    class KilledError(Exception):
        pass

    loss = Training._loss

    def dies(training: Training, stream: Any, of_step: int) -> Any:
        if of_step == step:
            raise KilledError
        return loss(training, stream, of_step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Training, "_loss", dies)
        with pytest.raises(KilledError):
            yield
