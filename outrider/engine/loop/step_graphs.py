"""CUDA graphs of an engine's steps."""

from collections.abc import Callable

from outrider.engine.forward.batch_invariant import PASS_TOKENS
from outrider.engine.forward.graphs import (
    GraphBatch,
    Graphs,
    captured_sizes,
    chunk_logits,
    chunk_sizes,
)
from outrider.engine.inputs.choice_input import ChoiceInput
from outrider.engine.inputs.step_input import StepInput
from outrider.engine.loading.weights import resolve_prefill_chunk
from outrider.engine.settings import EngineSettings


class StepGraphs:
    """Graphs of steps without adapters, and of steps with adapters if there may be any.

    Rows of a graph without adapters cost what they cost in an engine without adapters.
    """

    def __init__(self, settings: EngineSettings, device: str, graphs_of: Callable[..., Graphs]) -> None:
        """
        Args:
            settings: settings with all open values resolved.
            device: kind of device.
            graphs_of: makes graphs, with arguments of Graphs from ``sizes`` on.
        """
        self._settings, self._device, self._graphs_of = settings, device, graphs_of
        # Without adapters, and with them: first of steps without prompts, then of steps with them.
        self._graphs: tuple[list[Graphs], list[Graphs]] = [], []

    def capture(self) -> tuple[str, ...]:
        """Captures all graphs; returns the reasons why some are missing."""
        settings = self._settings
        if settings.batch_invariant:
            return self._capture((PASS_TOKENS[self._device],))
        reasons = self._capture(captured_sizes(settings))
        sizes = chunk_sizes(settings, resolve_prefill_chunk(settings))
        return reasons + (self._capture(sizes, chunk_logits(settings)) if sizes else ())

    def batch(self, step: StepInput, choice: ChoiceInput | None) -> GraphBatch | None:
        """Returns the step in a graph's memory; None if no graph fits the step. choice: argument of fill."""
        without, with_adapters = self._graphs
        for graphs in with_adapters if [feed for feed in step.feeds if feed.adapter] else without:
            if (batch := graphs.batch(step, choice)) is not None:
                return batch
        return None

    def _capture(self, sizes: tuple[int, ...], logits: int | None = None) -> tuple[str, ...]:
        reasons: list[str] = []
        adapters, beside = self._settings.most_adapters, None
        # The input of steps with adapters is larger, and steps without them use its memory too.
        for most in (adapters, 0) if adapters else (0,):
            beside = self._graphs_of(
                sizes, as_chains=self._settings.batch_invariant, logits=logits, adapters=most, beside=beside
            )
            self._graphs[most > 0].append(beside)
            reasons += beside.capture()
        return (*dict.fromkeys(reasons),)
