"""Trial of a target drafter on tokens that the target has already chosen.

Under keyed noise a guess is correct if it equals the token that the target chose, at any temperature. So a
trial needs no pass of the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.sampler import choose_tokens
from outrider.engine.drafters.target_drafter import feed_of
from outrider.engine.inputs.step_input import Feed
from outrider.engine.sequence import EngineSequence

FEWEST, MOST = 8, 24  # least and largest number of positions of a trial

# Returns logits [num_logits, vocab_size], and whether each token's numbers are finite: bool [num_tokens].
Pass = Callable[[list[Feed]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TrialResult:
    """Counts of guesses that were compared with the target's tokens."""

    agreed: int
    positions: int


def trial(sequences: Sequence[EngineSequence], cache: PagedCache, run: Pass) -> TrialResult | None:
    """Judges a pass over the newest tokens of a sequence; None: no sequence has enough tokens.

    The pass writes to blocks of its own, so the target's cache is unchanged.
    """
    for sequence in sequences:
        if (start := _start(sequence, cache)) is not None:
            return _judged(sequence, start, cache, run)
    return None


def _start(sequence: EngineSequence, cache: PagedCache) -> int | None:
    """Returns the start of a block after which the target has chosen enough tokens; None: too few."""
    end = len(sequence.tokens) - 1
    first = max(sequence.prompt_length - 1, end - MOST)
    start = -(-first // cache.block_size) * cache.block_size
    # Under other verification rules, or with a grammar, the target's token may not be its choice under noise.
    is_comparable = sequence.sampling.verification == "coupled" and sequence.matcher is None
    if not is_comparable or end - start < FEWEST or start > sequence.cached:
        return None
    return start


def _judged(sequence: EngineSequence, start: int, cache: PagedCache, run: Pass) -> TrialResult | None:
    copied = EngineSequence(
        sequence.number,
        sequence.prompt_length,
        sequence.noise_key,
        sequence.sampling,
        sequence.end_token_ids,
        sequence.limit,
        prompt=sequence.prompt,
        tokens=sequence.tokens[: start + 1],
    )
    said = sequence.tokens[start + 1 :]
    cache.adopt_prefix(copied)
    try:
        if copied.cached != start or not cache.reserve(copied, start + len(said)):
            return None
        fed = sequence.tokens[start:-1]
        logits, are_finite = run([feed_of(copied, fed, start, num_logits=len(fed))])
        generated = copied.tokens[copied.prompt_length :]
        rows = [copied.row(generated, tuple(said[:place])) for place in range(len(said))]
        (choices,), finite = choose_tokens(logits, [rows], are_finite)
        if not all(finite):
            cache.clear(copied, start)
        pairs = zip(choices.chosen, said, strict=True)
        return TrialResult(sum(guess == token for guess, token in pairs), len(said))
    finally:
        cache.release(copied)
