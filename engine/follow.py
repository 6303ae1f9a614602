"""What ranks other than 0 do: the forward passes that rank 0 orders, until it has no more."""

import torch

from engine.forward import ForwardPass
from engine.tensor_parallel import RankGroup


@torch.inference_mode()
def follow(forward: ForwardPass, group: RankGroup) -> None:
    """Over this rank's share of the model; returns when rank 0 dismisses its group.

    Raises:
        RuntimeError: rank 0 or another rank is gone.
    """
    while (step := group.receive()) is not None:
        forward.run(step, forward.pack(step))
