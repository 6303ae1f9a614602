"""Makes the sequences of a request, one per answer."""

from collections.abc import Iterable
from itertools import product

from gateway.adapter import Adapter
from gateway.generation.request import Request
from gateway.sequence import GatewaySequence
from outrider.decoding.settings import Sampling
from outrider.drafters.past_answers import Scope


def sequences_of(
    request: Request,
    prompts: Iterable[tuple[int, ...]],
    sampling: Sampling,
    scope: Scope,
    adapter: Adapter,
    predictions: Iterable[tuple[int, ...]],
) -> tuple[GatewaySequence, ...]:
    """Returns a sequence per answer. Its noise key does not depend on other prompts of the request."""
    return tuple(
        GatewaySequence(
            prompt,
            sampling,
            sampling.noise_key(choice, prompt),
            scope=scope,
            is_scored=request.scores_prompts,
            generates=request.generates,
            adapter=adapter,
            prediction=prediction,
        )
        for (prompt, choice), prediction in zip(product(prompts, range(request.n)), predictions, strict=True)
    )
