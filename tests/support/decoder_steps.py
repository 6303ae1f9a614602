"""Steps of all kinds for a decoder, and their logits."""

import torch

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.forward_pass import ForwardPass

BLOCK_SIZE = 8
BLOCKS = HeldBlocks([5, 2, 7, 3, 9, 4])
OTHERS = HeldBlocks([10])
PROMPT = list(range(10, 40))
OTHER = [7, 8, 9]
TREE = Draft((50, 51, 52, 53), (ROOT, ROOT, 0, 1))
# Two prompts, a token, a chain and a tree.
STEPS = [
    [Feed(PROMPT, len(PROMPT), 0, BLOCKS, None), Feed(OTHER, 1, 0, OTHERS, None)],
    [Feed([60], 1, len(PROMPT), BLOCKS, None)],
    [Feed([61, 62, 63], 3, len(PROMPT) + 1, BLOCKS, None)],
    [Feed([61, *TREE.tokens], 5, len(PROMPT) + 1, BLOCKS, TREE)],
]


def steps_logits(forward: ForwardPass) -> torch.Tensor:
    """Returns the logits of all steps, float32 [num_logits, vocab_size]."""
    with torch.inference_mode():
        steps = (StepInput.of(forward.tables, feeds) for feeds in STEPS)
        outputs = [forward.run(forward.prepare(step)) for step in steps]
    return torch.cat([output.logits for output in outputs]).float()
