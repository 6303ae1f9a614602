"""First promise of a deployment, as far as it is kept: the same seed gives the same text."""

from outrider.engine.settings import EngineSettings


def first_promise(
    settings: EngineSettings, dtype: str, *, is_quantized: bool, why_refused: str | None
) -> str:
    """Returns a sentence on how far the target keeps the promise, and on the setting that makes it exact.

    Args:
        settings: settings of the target's engine.
        dtype: type in which it computes, as torch names it: ``bfloat16``.
        is_quantized: whether its weights are quantized, at load or in the checkpoint.
        why_refused: why batch-invariant numerics are refused; None: they are accepted.
    """
    if settings.batch_invariant:
        return f"same seed, same text: exactly, in {dtype} with batch-invariant numerics"
    rounded = ["quantized weights"] * is_quantized
    if settings.cache_dtype != "auto":
        rounded.append(f"a cache of {settings.cache_dtype}")
    if dtype == "float32" and not rounded:
        return "same seed, same text: exactly but for near-ties, in float32"
    kind = f"{dtype} with {' and '.join(rounded)}" if rounded else dtype
    said = f"same seed, same text: up to rounding, in {kind}: load and Drafts may change a text now and then"
    if why_refused is None:
        return f"{said}. target.batch_invariant=true makes it exact"
    return f"{said}. target.batch_invariant=true is refused here: {why_refused}"
