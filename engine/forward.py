"""A model over its paged cache, and its forward pass: what all ranks of a group do alike."""

import torch

from engine.attention import Paged
from engine.batch import Batch, pack
from engine.cache import PagedCache
from engine.graphs import Graphs, capture_cuda
from engine.load_timings import LoadTimings
from engine.memory import blocks_in, device_memory
from engine.memory_plan import resolve_cache
from engine.outline import outline
from engine.reproducible import check_rows_are_apart, passes
from engine.settings import EngineSettings
from engine.step_input import StepInput
from engine.tensor_parallel import RankGroup
from engine.varlen import Kernel, find_kernel
from engine.weights import attach, load_model


class ForwardPass:
    """The model, or a rank's shard of it, with the keys and values that it computes."""

    def __init__(self, settings: EngineSettings, group: RankGroup | None = None) -> None:
        """
        group: of this process, if ``settings.tensor_parallel`` is more than 1; all its ranks build at once.

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
        if settings.reproducible:
            check_rows_are_apart(self.model, settings.model)
        dtype, device = self.model.dtype, self.model.device
        found = {
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "threads": torch.get_num_threads(),
        }
        settings = settings.model_copy(update=found)
        memory = device_memory(device)
        with self.load_timings.timed("cache"):
            if settings.cache_memory is None:
                settings = resolve_cache(outline(settings), settings, memory)
            num_blocks = blocks_in(memory, settings, layers.shapes, dtype)
            if group is not None:
                num_blocks = group.least(num_blocks)
            self.cache = PagedCache(layers.shapes, num_blocks, settings.block_size, dtype, device)
        self.settings = settings  # those in force: nothing is left open
        self._kernel: Kernel | None = None
        if layers.has_plain_scores:
            self._kernel = find_kernel(layers.shapes, settings.block_size, dtype, device)
        self._graphs: Graphs | None = None
        if self._kernel is not None and settings.graphs and not settings.reproducible and group is None:
            self._graphs = Graphs(self._run, capture_cuda, settings.block_size, self.cache.spare_block)

    def pack(self, step: StepInput) -> Batch:
        """The step's tensors."""
        model, is_paged = self.model, self._kernel is not None
        return pack(step.feeds, self.settings.block_size, model.dtype, model.device, is_paged=is_paged)

    def run(self, step: StepInput, batch: Batch) -> torch.Tensor:
        """[num_logits, vocab_size]; at ranks other than 0 only their share of the vocabulary."""
        self.cache.make(step.moves)
        if self.settings.reproducible:
            return self._run_in_passes(batch)
        logits = self._graphs.run(batch) if self._graphs is not None else None
        return self._run(batch) if logits is None else logits

    def _run_in_passes(self, batch: Batch) -> torch.Tensor:
        spare_slot = self.cache.spare_block * self.settings.block_size
        logits = [self._run(part)[part.wanted] for part in passes(batch, spare_slot)]
        return torch.cat([part for part in logits if len(part)] or logits[:1])

    def _run(self, batch: Batch) -> torch.Tensor:
        output = self.model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            outrider=Paged(batch, self.cache, self._kernel),
        )
        logits: torch.Tensor = output.logits[0]
        return logits
