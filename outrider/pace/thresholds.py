"""The classic fixed rules: off at low acceptance, shallower and off under load. Torch-free."""

from outrider.pace.settings import PaceSettings


def threshold_depth(
    settings: PaceSettings,
    acceptance_rate: float,
    running: float,
    *,
    is_drafting: bool,
    is_batch: bool = False,
) -> int:
    """
    Args:
        acceptance_rate: accepted / verified.
        running: sequences that decode at the target; those whose prompt is taken in do not count.
        is_drafting: whether the sequence has Drafts now: it takes more to begin than to go on.
        is_batch: whether it is marked batch: its Drafts end where others get shallower.
    """
    least = settings.off_below if is_drafting else settings.on_above
    off_from = min(settings.half_depth_from, settings.off_from) if is_batch else settings.off_from
    if running >= off_from or acceptance_rate < least:
        return 0
    if running >= settings.half_depth_from:
        return (settings.threshold_depth + 1) // 2
    return settings.threshold_depth
