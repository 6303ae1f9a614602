"""A model over its paged cache, and its forward pass: what all ranks of a group do alike."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outrider.engine.cache.paged_cache import LayerShape, PagedCache
from outrider.engine.errors import CacheLostError
from outrider.engine.forward.attention import Paged, Probe
from outrider.engine.forward.batch import Batch, pack
from outrider.engine.forward.batch_invariant import check_rows_are_apart, passes
from outrider.engine.forward.graphs import Computed, Graphs, capture_cuda
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.forward.varlen import Kernel, find_kernel
from outrider.engine.loading.self_check.check import check_model
from outrider.engine.loading.self_check.script import blocks_needed
from outrider.engine.loading.skeleton import skeleton
from outrider.engine.loading.timings import LoadTimings
from outrider.engine.loading.weights import attach, context_length, load_model
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.planning.memory import blocks_in, device_memory
from outrider.engine.planning.memory_plan import resolve_cache
from outrider.engine.settings import EngineSettings
from outrider.engine.step_input import StepInput


@dataclass(frozen=True)
class ForwardOutput:
    """What a pass computes."""

    logits: torch.Tensor  # [num_logits, vocab_size], at ranks other than 0 only their share of the vocabulary
    hidden: torch.Tensor | None  # [num_logits, num_layers, hidden_size] of the layers that were asked for
    are_finite: torch.Tensor  # bool [num_tokens], whether all keys and values of each are, at all ranks


class ForwardPass:
    """The model, or a rank's shard of it, with the keys and values that it computes."""

    def __init__(
        self,
        settings: EngineSettings,
        group: RankGroup | None = None,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            group: of this process, if ``settings.tensor_parallel`` is more than 1; all its ranks build at
                once.
            hidden_layers: whose states are wanted beside the logits; -1 is the last.

        Raises:
            UnsupportedModelError: the checkpoint cannot run here, with the reason.
            CacheTooSmallError: the memory budget buys no block.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.load_timings = LoadTimings()
        with self.load_timings.timed("weights"):
            self.model = load_model(settings)
            layers = attach(self.model, settings.model)
        if settings.batch_invariant:
            check_rows_are_apart(self.model, settings.model)
        dtype, device = self.model.dtype, self.model.device
        found = {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "threads": torch.get_num_threads(),
        }
        self.settings = settings = settings.model_copy(update=found)
        self._group = group
        self._hidden_layers = hidden_layers
        self._graphs: Graphs | None = None
        self._kernel: Kernel | None = None
        if layers.has_plain_scores:
            self._kernel = find_kernel(layers.shapes, settings.block_size, dtype, device)
        if settings.self_check:
            with self.load_timings.timed("self_check"):
                self._check(layers)
        if device.type == "cpu":
            with self.load_timings.timed("weights"):
                optimize_for_cpu(self.model)
        with self.load_timings.timed("cache"):
            memory = device_memory(device)
            if settings.cache_memory is None:
                settings = resolve_cache(skeleton(settings), settings, memory)
            num_blocks = blocks_in(memory, settings, layers.shapes, dtype)
            if group is not None:
                num_blocks = group.least(num_blocks)
            self.cache = self._cache_of(layers.shapes, num_blocks)
        self.settings = settings  # those in force: nothing is left open
        if self._kernel is not None and settings.graphs and not settings.batch_invariant and group is None:
            self._graphs = Graphs(self._run, capture_cuda, settings.block_size, self.cache.spare_block)

    def _cache_of(self, shapes: Mapping[int, LayerShape], num_blocks: int) -> PagedCache:
        return PagedCache(shapes, num_blocks, self.settings.block_size, self.model.dtype, self.model.device)

    def _check(self, layers: Probe) -> None:
        """With a cache of its own, before there is much else in memory."""
        block_size = self.settings.block_size
        self.cache = self._cache_of(layers.shapes, blocks_needed(block_size))
        check_model(
            self.model,
            self.settings.model,
            layers.modules,
            lambda step: self.run(self.prepare(step)).logits,
            block_size,
            context_length(self.model),
            self._group,
        )
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()  # what it took is free for the cache

    def prepare(self, step: StepInput) -> Batch:
        """Makes the step's changes of the cache; returns its tensors. Raises CacheLostError."""
        try:
            self.cache.make(step.moves, step.cleared)
        except Exception as error:
            raise CacheLostError(f"tokens could not be moved in the cache: {error!r}") from error
        model, is_paged = self.model, self._kernel is not None
        return pack(step.feeds, self.settings.block_size, model.dtype, model.device, is_paged=is_paged)

    def run(self, batch: Batch) -> ForwardOutput:
        """Feeds the batch."""
        logits, hidden = self._computed(batch)
        are_finite = self.cache.are_finite(batch.slots)
        if self._group is not None:
            self._group.agree(are_finite)
        return ForwardOutput(logits, hidden, are_finite)

    def _computed(self, batch: Batch) -> Computed:
        if self.settings.batch_invariant:
            return self._run_in_passes(batch)
        computed = self._graphs.run(batch) if self._graphs is not None else None
        return self._run(batch) if computed is None else computed

    def _run_in_passes(self, batch: Batch) -> Computed:
        spare_slot = self.cache.spare_block * self.settings.block_size
        parts = [(part.wanted, self._run(part)) for part in passes(batch, spare_slot)]
        logits = _joined([logits[wanted] for wanted, (logits, _) in parts])
        if not self._hidden_layers:
            return logits, None
        return logits, _joined([hidden[wanted] for wanted, (_, hidden) in parts if hidden is not None])

    def _run(self, batch: Batch) -> Computed:
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            output_hidden_states=bool(self._hidden_layers),
            outrider=Paged(batch, self.cache, self._kernel),
        )
        if not self._hidden_layers:
            return output.logits[0], None
        states = [output.hidden_states[layer][0][batch.logit_rows] for layer in self._hidden_layers]
        return output.logits[0], torch.stack(states, dim=1)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along the first dimension, of which some parts may have nothing."""
    return torch.cat([part for part in parts if len(part)] or parts[:1])
