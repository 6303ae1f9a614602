"""Runs of a script over our cache, and under transformers' own attention and cache."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from outrider.engine.forward.attention import ATTENTION
from outrider.engine.forward.linear import StoredLinear
from outrider.engine.inputs.step_input import Feed
from outrider.engine.loading.int8_product import LARGEST_INT8
from outrider.engine.loading.quantized import Int8Linear
from outrider.engine.loading.self_check.outputs import Outputs, is_rounding
from outrider.engine.loading.self_check.script import SINGLES, Script
from outrider.engine.parallel.rank_group import RankGroup

Run = Callable[[Sequence[Feed]], Tensor]  # returns logits [num_logits, vocab_size] of a step over our cache
WINDOW = 8  # positions to which a sliding window is shortened
HEAD = -1  # layer number that stands for the logits
WIDE = "outrider_wide_eager"
# Precision of inputs that are rounded to 8 bits: one step, relative to a third of a row's largest number,
# their usual size. Earlier rounding decides how a number near the middle of two steps is rounded.
INT8_PRECISION = 3 / LARGEST_INT8
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


class Runs:
    """Runs of one loaded model whose attention calls ours (weights.attach)."""

    def __init__(self, model: Any, layers: Mapping[int, nn.Module], group: RankGroup | None) -> None:
        """
        Args:
            layers: modules that call our attention, by layer.
            group: group of this process, all of whose ranks run the script.
        """
        self._model = model
        self._layers = layers
        self._group = group
        eight_bit = any(isinstance(module, Int8Linear) for module in model.modules())
        self._precision = INT8_PRECISION if eight_bit else torch.finfo(model.dtype).eps
        self._recorded: dict[int, list[Tensor]] = {}

    def holds(self, claim: bool) -> bool:
        """Whether the claim holds at every rank, so that all ranks act alike."""
        return claim if self._group is None else bool(self._group.least(claim))

    @torch.inference_mode()
    def compute(self, script: Script, run: Run, *, by_layer: bool = False) -> dict[int, Outputs]:
        """Returns the logits, under ``HEAD``; with ``by_layer`` also outputs of attention by layer, if known.

        run: computes all logits of a step, over a cache of ``blocks_needed`` blocks.
        """
        with self._recording(self._layers if by_layer else {}):
            ours = [self._step(step, run) for step in script.steps]
            try:
                with _widened(self._model):
                    whole, again = self._theirs(script)
            finally:
                self._model.set_attn_implementation(ATTENTION)
        rows = [row.path for row in script.rows], [row.position for row in script.rows]
        return {
            layer: Outputs(
                torch.cat([step[layer] for step in ours], 1)[0],
                whole[layer][rows],
                again[layer][rows],
                self._precision,
            )
            for layer in sorted(set(whole).intersection(again, *ours))
        }

    @torch.inference_mode()
    def ours(self, script: Script, run: Run) -> Tensor:
        """Returns our logits [num_rows, vocab_size]."""
        return torch.cat([self._step(step, run)[HEAD] for step in script.steps], 1)[0]

    def _step(self, feeds: list[Feed], run: Run) -> dict[int, Tensor]:
        self._record(HEAD, run(feeds)[None])
        count = sum(len(feed.tokens) for feed in feeds)  # batch-invariant passes add rows of padding
        return {layer: output[:, :count] for layer, output in self._take().items()}

    def _theirs(self, script: Script) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Returns transformers' outputs of both attentions by layer, [num_paths, length, size]."""
        ids = torch.tensor(script.paths, device=self._model.device)
        self._model.set_attn_implementation("eager")
        self._record(HEAD, self._model(input_ids=ids, use_cache=False).logits)
        whole = self._take()
        last = ids[:, -SINGLES:].tensor_split(SINGLES, 1)  # few rows round differently from many
        again = self._again([ids[:, : script.cut], ids[:, script.cut : -SINGLES], *last])
        late = slice(None), slice(script.cut, None)
        suits = is_rounding(whole[HEAD][late], again[HEAD][late], self._precision)
        if not self.holds(suits):  # more than rounding, perhaps by their cache: run without it
            again = self._again([ids])
        return whole, again

    def _again(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns outputs by another attention of transformers; several pieces are run over its cache."""
        for name in ("sdpa", WIDE):
            try:
                self._model.set_attn_implementation(name)
                cache = DynamicCache(config=self._model.config) if len(pieces) > 1 else None
                for piece in pieces:
                    output = self._model(input_ids=piece, cache=cache, use_cache=cache is not None)
                    self._record(HEAD, output.logits)
                break
            except ValueError:  # the model has no such attention
                self._take()
        return self._take()

    @contextmanager
    def _recording(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        def hook(layer: int) -> Callable[..., None]:
            def record(module: nn.Module, arguments: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, Tensor) and first.ndim == 3:  # [texts, tokens, size]
                    self._record(layer, first)

            return record

        handles = [module.register_forward_hook(hook(layer)) for layer, module in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, layer: int, output: Tensor) -> None:
        self._recorded.setdefault(layer, []).append(output)

    def _take(self) -> dict[int, Tensor]:
        """Returns the recorded outputs, joined along the texts, and forgets them."""
        recorded, self._recorded = self._recorded, {}
        return {layer: torch.cat(parts, 1) for layer, parts in recorded.items()}


def _wide_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes the model's own eager attention in a wider type."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    wider = WIDER[query.dtype]
    output, _ = eager(module, query.to(wider), key.to(wider), value.to(wider), mask, **kwargs)
    return output.to(query.dtype), None


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Multiplies by dequantized weights in this context, in place of our kernels for stored weights."""
    layers = [module for module in model.modules() if isinstance(module, StoredLinear)]
    products = [layer.multiply for layer in layers]
    for layer in layers:
        layer.multiply = layer.multiply_widened
    try:
        yield
    finally:
        for layer, product in zip(layers, products, strict=True):
            layer.multiply = product


AttentionInterface.register(WIDE, _wide_eager)
AttentionMaskInterface.register(WIDE, eager_mask)


@contextmanager
def short_windows(model: Any, context_length: int) -> Iterator[int | None]:
    """Shortens sliding windows to ``WINDOW`` in this context; yields the window in force, None: no window."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or window >= context_length:
        yield None
        return
    owners = [
        config,
        *(module for module in model.modules() if getattr(module, "sliding_window", None) == window),
    ]
    short = min(window, WINDOW)
    for owner in owners:
        owner.sliding_window = short
    try:
        yield short
    finally:
        for owner in owners:
            owner.sliding_window = window
