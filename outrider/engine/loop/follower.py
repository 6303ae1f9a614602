"""Loop of the ranks other than 0, which run the passes of target and drafters that rank 0 sends."""

import logging

import torch

from outrider.engine.blame import says_broken
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.parallel.adapter_change import AdapterChange
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.parallel.rank_group import RankGroup

logger = logging.getLogger(__name__)


@torch.inference_mode()
def follow(forward: ForwardPass, group: RankGroup) -> None:
    """Runs passes over this rank's share of model and drafters until rank 0 dismisses its group.

    A pass that raises here usually raises at rank 0 too, which finds the sequence to blame. If rank 0 does
    not raise, the collective operations of the two ranks no longer match. The next step detects this, or the
    step timeout ends both processes.

    Raises:
        RankLostError: rank 0 or another rank is gone, or a pass has failed at one rank only.
        Exception: the device is broken, or out of memory.
    """
    while (received := group.receive(forward.tables)) is not None:
        if isinstance(received, AdapterChange):
            forward.adapters.follow(received, group)
            continue
        try:
            if isinstance(received, DrafterStep):
                forward.drafters.follow(received)
            else:
                step, chosen = received
                forward.run(forward.prepare(step), chosen)
            group.passes += 1
        except Exception as error:
            if says_broken(error):
                raise
            logger.exception("a forward pass failed at this rank")
