"""First promise of a deployment, and how far it is kept: the same seed gives the same text."""

from typing import NamedTuple

from outrider.engine.settings import EngineSettings


class Promise(NamedTuple):
    """How far a target keeps the first promise."""

    sentence: str
    is_exact: bool  # whether rounding changes no text, except for near-ties in float32


def first_promise(
    settings: EngineSettings, dtype: str, *, is_quantized: bool, why_refused: str | None
) -> Promise:
    """Returns how far the target keeps the promise, and the setting that makes it exact.

    Args:
        settings: settings of the target's engine.
        dtype: type in which it computes, as torch names it: ``bfloat16``.
        is_quantized: whether its weights are quantized, at load or in the checkpoint.
        why_refused: why batch-invariant numerics are refused; None: they are accepted.
    """
    if settings.batch_invariant:
        return Promise(f"same seed, same text: exactly, in {dtype} with batch-invariant numerics", True)
    rounded = ["quantized weights"] * is_quantized
    if settings.cache_dtype != "auto":
        rounded.append(f"a cache of {settings.cache_dtype}")
    if dtype == "float32" and not rounded:
        return Promise("same seed, same text: exactly but for near-ties, in float32", True)
    kind = f"{dtype} with {' and '.join(rounded)}" if rounded else dtype
    said = f"same seed, same text: up to rounding, in {kind}: load and Drafts may change a text now and then"
    if why_refused is None:
        return Promise(f"{said}. target.batch_invariant=true makes it exact", False)
    return Promise(f"{said}. target.batch_invariant=true is refused here: {why_refused}", False)
