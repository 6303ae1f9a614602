"""How far a deployment keeps the first promise, told in one line."""

import pytest

from outrider.engine.planning.promise import first_promise
from outrider.engine.settings import EngineSettings

NARROW = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("invariant", "dtype", "quantized", "cache", "refusal", "told"),
    [
        (True, "bfloat16", False, "auto", None, "exactly, in bfloat16 with batch-invariant numerics"),
        (True, "float16", True, "auto", None, "exactly, in float16 with batch-invariant numerics"),
        (False, "float32", False, "auto", None, "exactly but for near-ties, in float32"),
        (False, "float32", True, "auto", None, "up to rounding, in float32 with quantized weights: "),
        (False, "float32", False, NARROW, None, "up to rounding, in float32 with a cache of float8_e4m3fn: "),
        (False, "bfloat16", False, "auto", "experts mix", "up to rounding, in bfloat16: "),
    ],
)
def test_first_promise_tells_how_far_it_holds(invariant, dtype, quantized, cache, refusal, told):
    settings = EngineSettings(model="m", batch_invariant=invariant, cache_dtype=cache)
    said = first_promise(settings, dtype, is_quantized=quantized, why_refused=refusal)
    assert said.sentence.startswith(f"same seed, same text: {told}")
    assert said.is_exact == told.startswith("exactly")


def test_first_promise_up_to_rounding_says_what_would_make_it_exact_or_why_nothing_does():
    settings = EngineSettings(model="m")
    said = first_promise(settings, "bfloat16", is_quantized=False, why_refused=None)
    assert said.sentence.endswith(". target.batch_invariant=true makes it exact")
    said = first_promise(settings, "bfloat16", is_quantized=False, why_refused="experts mix")
    assert said.sentence.endswith(". target.batch_invariant=true is refused here: experts mix")
