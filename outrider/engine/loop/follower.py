"""Loop of ranks other than 0: they run the passes of target and drafter that rank 0 orders."""

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
    """Runs passes over this rank's share of model and drafter until rank 0 dismisses its group.

    A pass that raises here has raised at rank 0 too, which finds the sequence to blame. If rank 0 did not
    raise, the two ranks are at different exchanges. The next step detects it, or the limit on a step's time
    ends both.

    Raises:
        RankLostError: rank 0 or another rank is gone, or a rank has failed alone.
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
