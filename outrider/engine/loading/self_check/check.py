"""Compares a model on the paged cache with the same weights under transformers' own attention and cache.

Before anything is served, two texts are run both ways:

    step 1   the first text's prompt, packed with the first chunk of the second text
    step 2   the second chunk of the second text
    step 3   a drafted chain after the first text, packed with the second text's last tokens, one by one
    step 4   a drafted tree after the first text, in place of the chain

In transformers every path of the tree is a text of its own. The reference is its eager attention, which
computes each text in one piece. A second run of transformers computes the texts in pieces over its cache. It
uses SDPA, or eager attention in a wider type if the model has no SDPA. The difference between these two runs
shows the effect of rounding on this model in its type. Ours may differ from the reference by a few times that
difference.

The median row of each kind of rows is compared. If two experts nearly tie, rounding chooses between them.
Such a row may differ by any amount, even between the two runs of transformers.

During the check sliding windows are shortened for all runs, so that short texts are longer than a window.
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
from outrider.engine.loading.self_check.outputs import Difference, Outputs, differences, is_finite
from outrider.engine.loading.self_check.runs import HEAD, Run, Runs, short_windows
from outrider.engine.loading.self_check.script import LENGTH, SHORTEST, Script, pick_tokens, write_script
from outrider.engine.parallel.rank_group import RankGroup

logger = logging.getLogger(__name__)


class SelfCheck:
    """Check of one loaded model whose attention calls ours (weights.attach)."""

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
            layers: modules that call our attention, by layer.
            context_length: tokens of the longest sequence to be served.
            group: group of this process, all of whose ranks run the check.
        """
        self._model = model
        self._block_size = block_size
        self._context_length = context_length
        self._runs = Runs(model, layers, group)
        self._outputs: Outputs | None = None  # logits that passed the check

    def check(self, name: str, run: Run) -> None:
        """Checks that the model computes the same logits on our cache as without it, up to rounding.

        Args:
            name: name of the model, for messages.
            run: computes all logits of a step, over a cache of ``blocks_needed`` blocks.

        Raises:
            UnsupportedModelError: the logits differ, as the message says; all ranks raise if a rank raises.
        """
        started = time.perf_counter()
        if self._context_length < SHORTEST:
            logger.warning("model=%r: no self-check of a context of %d tokens", name, self._context_length)
            return
        kind = type(self._model).__name__
        with self._script() as script:
            try:
                outputs = self._runs.compute(script, run)[HEAD]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model may raise anything
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
                raise UnsupportedModelError(
                    f"model={name!r}: on the paged cache {kind} does not compute what it computes"
                    f" under transformers' own attention{where}: {_described(found)}. self_check=False"
                    " serves it nevertheless"
                )
        self._outputs = outputs
        logger.info("self-check: %.1f s", time.perf_counter() - started)

    def differs(self, run: Run) -> str:
        """Returns how the model differs from transformers after layers were replaced, or "" if it does not.

        It compares with the outputs of ``check``. The result is empty at all ranks or at none.
        """
        if self._outputs is None:
            return ""
        with self._script() as script:
            outputs = replace(self._outputs, ours=self._runs.ours(script, run), are_reordered=True)
            found = differences(script.rows, outputs)
        return "" if self._runs.holds(not found) else _described(found)

    @contextmanager
    def _script(self) -> Iterator[Script]:
        """Yields the script, and shortens sliding windows in this context."""
        length = min(self._context_length, LENGTH)
        with short_windows(self._model, self._context_length) as window:
            yield write_script(length, pick_tokens(self._model.config), self._block_size, window)


def _described(found: list[Difference]) -> str:
    """Describes the differences that this rank has found; it may have none if another rank has."""
    return "; ".join(map(str, found)) or "at another rank"
