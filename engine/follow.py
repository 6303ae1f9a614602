"""What ranks other than 0 do: the forward passes that rank 0 orders, until it has no more."""

import torch

from engine.forward import ForwardPass
from engine.settings import EngineSettings
from engine.tensor_parallel import RankGroup


@torch.inference_mode()
def follow(settings: EngineSettings, group: RankGroup) -> None:
    """Loads this rank's share of the model; returns when rank 0 dismisses its group.

    Raises:
        RuntimeError: rank 0 or another rank is gone.
    """
    forward = ForwardPass(settings, group)
    while (step := group.receive()) is not None:
        forward.run(step, forward.pack(step))
