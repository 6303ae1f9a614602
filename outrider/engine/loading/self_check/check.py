"""Compares a model on the paged cache with the same weights under transformers' own attention and cache.

Two texts run both ways before anything is served:

    step 1   the first one's prompt, packed with the first chunk of the second one's
    step 2   the second chunk of the second one's
    step 3   a drafted chain after the first, packed with the second's last tokens, one by one
    step 4   a drafted tree after the first, where it was before the chain

To transformers every path of the tree is a text. Its eager attention computes each in one piece: that is what
ours has to equal. It computes them once more, in pieces over its cache, by SDPA; where a model has none,
with eager attention in a wider type. What differs then is what rounding does to this model, in its type. Ours
may differ a few times as much.

In each kind of rows the middle one counts: where two experts nearly tie, rounding chooses, and such a row may
differ by any amount, between transformers' own two runs as well.

Sliding windows are shortened meanwhile, on both sides, so that short texts reach beyond them.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loading.self_check.outputs import Outputs, differences, is_finite
from outrider.engine.loading.self_check.runs import HEAD, Run, Runs, short_windows
from outrider.engine.loading.self_check.script import LENGTH, SHORTEST, Script, pick_tokens, write_script
from outrider.engine.parallel.rank_group import RankGroup

logger = logging.getLogger(__name__)


class SelfCheck:
    """Check of one loaded model, whose attention goes through ours (weights.attach)."""

    def __init__(
        self,
        model: Any,
        layers: Mapping[int, nn.Module],
        block_size: int,
        context_length: int,
        group: RankGroup | None = None,
    ) -> None:
        """
        Args:
            layers: the modules that call our attention.
            context_length: tokens of the longest sequence that it is to serve.
            group: whose ranks all do the same.
        """
        self._model = model
        self._block_size = block_size
        self._context_length = context_length
        self._runs = Runs(model, layers, group)
        self._outputs: Outputs | None = None  # the logits, once they were found to be right

    def check(self, name: str, run: Run) -> None:
        """Returns if the model computes on our cache what it computes without, up to rounding.

        Args:
            name: for messages.
            run: steps over a cache of ``blocks_needed`` blocks; all their logits.

        Raises:
            UnsupportedModelError: it does not, with what differs; at all ranks if at one.
        """
        begun = time.perf_counter()
        if self._context_length < SHORTEST:
            logger.warning("model=%r: no self-check of a context of %d tokens", name, self._context_length)
            return
        kind = type(self._model).__name__
        with self._script() as script:
            try:
                outputs = self._runs.compute(script, run)[HEAD]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model does that does not suit
                raise UnsupportedModelError(
                    f"model={name!r}: {kind} does not run in the self-check: {type(error).__name__}: {error}"
                ) from error
            found = differences(script.rows, outputs)
            if not self._runs.holds(is_finite(outputs.whole)):
                raise UnsupportedModelError(
                    f"model={name!r}: its logits are not finite in {self._model.dtype}, as transformers"
                    " computes them too: give another dtype"
                )
            if not self._runs.holds(not found):
                by_layer = self._runs.compute(script, run, by_layer=True)
                del by_layer[HEAD]
                first = next(
                    (layer for layer, outputs in by_layer.items() if differences(script.rows, outputs)), None
                )
                where = "" if first is None else f", first in layer {first}"
                what = "; ".join(map(str, found)) or "at another rank"
                raise UnsupportedModelError(
                    f"model={name!r}: on the paged cache {kind} does not compute what it computes"
                    f" under transformers' own attention{where}: {what}. self_check=False serves it"
                    " nevertheless"
                )
        self._outputs = outputs
        logger.info("self-check: %.1f s", time.perf_counter() - begun)

    def differs(self, run: Run) -> str:
        """Differences of another way of computing the model, which passed; empty if there are none."""
        if self._outputs is None:
            return ""
        with self._script() as script:
            outputs = replace(self._outputs, ours=self._runs.ours(script, run))
            return "; ".join(map(str, differences(script.rows, outputs)))

    @contextmanager
    def _script(self) -> Iterator[Script]:
        """Runs while sliding windows are short."""
        length = min(self._context_length, LENGTH)
        with short_windows(self._model, self._context_length) as window:
            yield write_script(length, pick_tokens(self._model.config), self._block_size, window)
