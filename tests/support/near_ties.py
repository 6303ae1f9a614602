"""Margins of choices. Rounding may change a choice only at a near-tie."""

import torch
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import process
from outrider.demo.prompts import DEMO
from outrider.engine.offline.speculate import OfflineRequest
from tests.support.checkpoints import NEAR_TIE
from tests.support.demo_pair import engine
from workshop.demo.pair import load_model


def margin(logits: Tensor, row: ChoiceContext) -> float:
    """Returns the difference between the two largest perturbed logits. logits: [1, vocab_size]."""
    first, second = gumbel_max(process(logits, [row]), [row], 2)[1][0]
    return float(first - second)


def margin_at(request: OfflineRequest, tokens: tuple[int, ...], place: int) -> float:
    """Returns the margin of a token in an answer of the demo target, by transformers' plain forward pass."""
    model = load_model(DEMO / "target").float().eval()
    generated = list(tokens[:place])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*request.prompt, *generated]])).logits[0, -1:]
    length = len(request.prompt)
    position = length + place - request.sampling.noise_origin(length)
    ends = engine("target").runner.end_token_ids
    return margin(
        logits,
        ChoiceContext(request.sampling, request.noise_key, position, request.prompt, generated, (), ends),
    )


def near_ties(
    requests: list[OfflineRequest], expected: list[tuple[int, ...]], found: list[tuple[int, ...]]
) -> int:
    """Returns the number of differing answers. Raises AssertionError if one starts at no near-tie."""
    differing = 0
    for number, (request, wanted, got) in enumerate(zip(requests, expected, found, strict=True)):
        if wanted == got:
            continue
        pairs = enumerate(zip(wanted, got, strict=False))
        place = next((i for i, (left, right) in pairs if left != right), min(len(wanted), len(got)))
        apart = margin_at(request, wanted, place)
        assert apart <= NEAR_TIE, f"request {number} differs at {place}, margin {apart:.1e}"
        differing += 1
    return differing
