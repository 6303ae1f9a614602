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
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.step_input import Feed, Numbers, StepInput

logger = logging.getLogger(__name__)

Run = Callable[[StepInput], Tensor]  # a step over our cache: [num_logits, vocab_size]

LENGTH, SHORTEST = 26, 14  # tokens of a path: as many as the context allows, and no check below
WINDOW = 8  # positions that a sliding window is shortened to
PARENTS = (ROOT, ROOT, 0, 0, 1, 2, 3, 4, 5, 6, 7)  # of the tree's nodes, level by level
LEVELS, LEAVES = 4, (8, 9, 10)
SINGLES = 5
FACTOR = 4.0  # ours may differ so many times as much as transformers' own two runs
ROUNDINGS = 2.0  # and by so many units of the type's precision at the size of the logits, in any case

HEAD = -1  # the logits, in the place of a layer
WIDE = "outrider_wide_eager"
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True)
class Row:
    """A token that we compute, and where transformers does."""

    kind: str
    path: int
    position: int


@dataclass(frozen=True)
class Script:
    """What is computed."""

    paths: list[list[int]]  # texts of one length
    steps: list[list[Feed]]
    rows: list[Row]  # of every token that the steps feed
    cut: int  # where transformers' own pieces meet


def check_model(
    model: Any,
    name: str,
    layers: Mapping[int, nn.Module],
    run: Run,
    block_size: int,
    context_length: int,
    group: RankGroup | None = None,
) -> None:
    """Returns if the model computes on our cache what it computes without, up to rounding.

    Args:
        name: for messages.
        layers: the modules that call our attention.
        run: steps over a cache of ``blocks_needed`` blocks; all their logits.
        context_length: tokens of the longest sequence that it is to serve.
        group: whose ranks all do the same.

    Raises:
        UnsupportedModelError: it does not, with what differs; at all ranks if at one.
    """
    begun = time.perf_counter()
    if context_length < SHORTEST:
        logger.warning("model=%r: no self-check of a context of %d tokens", name, context_length)
        return
    kind = type(model).__name__
    check = SelfCheck(model, layers, run, group)
    length = min(context_length, LENGTH)
    with short_windows(model, context_length) as window:
        script = write_script(length, pick_tokens(model.config), block_size, window)
        try:
            logits = check.compute(script)[HEAD]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model does that does not suit
            raise UnsupportedModelError(
                f"model={name!r}: {kind} does not run in the self-check: {type(error).__name__}: {error}"
            ) from error
        found = differences(script.rows, logits)
        if not check.holds(is_finite(logits.whole)):
            raise UnsupportedModelError(
                f"model={name!r}: its logits are not finite in {model.dtype}, as transformers computes them"
                " too: give another dtype"
            )
        if not check.holds(not found):
            by_layer = check.compute(script, by_layer=True)
            del by_layer[HEAD]
            first = next(
                (layer for layer, outputs in by_layer.items() if differences(script.rows, outputs)), None
            )
            where = "" if first is None else f", first in layer {first}"
            what = "; ".join(map(str, found)) or "at another rank"
            raise UnsupportedModelError(
                f"model={name!r}: on the paged cache {kind} does not compute what it computes"
                f" under transformers' own attention{where}: {what}. self_check=False serves it nevertheless"
            )
    logger.info("self-check: %.1f s", time.perf_counter() - begun)


def write_script(length: int, tokens: Iterator[int], block_size: int, window: int | None) -> Script:
    """Paths of ``length`` tokens. window: that every position from there on lies beyond, if there is one."""
    first, second, nodes = ([next(tokens) for _ in range(n)] for n in (length, length, len(PARENTS)))
    tree = Draft(tuple(nodes), PARENTS)
    root, chunk = length - LEVELS, length // 3
    prompt = root - 1  # the last committed token is fed with the drafted ones
    blocks = np.arange(blocks_needed(block_size))
    one, other = blocks[1::2][::-1], blocks[::2]  # never neighbours in order
    near = prompt if window is None else min(window, prompt)
    rows = _rows("packed prompts", 0, 0, near) + _rows("beyond the sliding window", 0, near, prompt)
    rows += _rows("packed prompts", 1, 0, chunk)
    rows += _rows("a second chunk", 1, chunk, length - 1)
    singles = range(length - SINGLES, length)
    rows += _rows("a drafted chain", 0, prompt, length) + _rows("single tokens", 1, length - SINGLES, length)
    rows += _rows("a drafted chain", 0, prompt, root)
    for node, depth in enumerate(tree.depths):
        leaf = next(place for place, leaf in enumerate(LEAVES) if node in tree.path(leaf))
        rows.append(Row("a drafted tree", 2 + leaf, root + depth))
    return Script(
        [first, second, *(first[:root] + [nodes[node] for node in tree.path(leaf)] for leaf in LEAVES)],
        [
            [_feed(first[:prompt], 0, one), _feed(second[:chunk], 0, other)],
            [_feed(second[chunk:-1], chunk, other)],
            [_feed(first[prompt:], prompt, one), *(_feed([second[n]], n, other) for n in singles)],
            [_feed([first[prompt], *nodes], prompt, one, tree)],
        ],
        rows,
        length // 2,
    )


def _feed(tokens: list[int], start: int, blocks: Numbers, tree: Draft | None = None) -> Feed:
    return Feed(tokens, len(tokens), start, blocks, tree)


def _rows(kind: str, path: int, start: int, end: int) -> list[Row]:
    return [Row(kind, path, position) for position in range(start, end)]


def blocks_needed(block_size: int) -> int:
    """Of the cache that the steps run over."""
    return 2 * -(-(LENGTH - LEVELS + len(PARENTS)) // block_size)


@dataclass(frozen=True)
class Difference:
    """Between ours and transformers', in rows of one kind."""

    kind: str
    found: float  # the middle row's largest
    allowed: float

    def __str__(self) -> str:
        return f"{self.kind} (by {self.found:.2g}, where rounding explains {self.allowed:.2g})"


@dataclass(frozen=True)
class Outputs:
    """Of one layer, or the logits; all [num_rows, size]."""

    ours: Tensor
    whole: Tensor  # transformers', in one piece
    again: Tensor  # transformers', the other way
    precision: float  # of the type they were computed in


def differences(rows: list[Row], outputs: Outputs) -> list[Difference]:
    """The kinds of rows in which ours differs from ``whole`` by more than rounding explains."""
    found = _largest(outputs.ours, outputs.whole)
    rounding = _largest(outputs.again, outputs.whole)
    of_kind = {row.kind: torch.tensor([other.kind == row.kind for other in rows]) for row in rows}
    middle = max(float(rounding[which].median()) for which in of_kind.values())
    allowed = FACTOR * middle + ROUNDINGS * outputs.precision * _size(outputs.whole)
    every = [Difference(kind, float(found[which].median()), allowed) for kind, which in of_kind.items()]
    return [difference for difference in every if not difference.found <= allowed]


def is_rounding(whole: Tensor, again: Tensor, precision: float) -> bool:
    """Whether it could be all that differs between transformers' own logits."""
    return bool(_largest(again, whole).median() <= precision**0.5 * _size(whole))


def is_finite(logits: Tensor) -> bool:
    """Whether they are numbers; a model may exclude tokens by minus infinity."""
    return not bool((logits.isnan() | (logits == torch.inf)).any())


def _size(outputs: Tensor) -> float:
    """How far the largest stands out; whatever a model gives to tokens that it never says."""
    outputs = outputs.float()
    return float((outputs.amax(-1) - outputs.median(-1).values).median())


def _largest(one: Tensor, other: Tensor) -> Tensor:
    """Of each row's differences; infinities may be equal."""
    one, other = one.float(), other.float()
    return (one - other).abs().masked_fill(one == other, 0.0).amax(-1).cpu()


class SelfCheck:
    """Of one loaded model, whose attention goes through ours (weights.attach)."""

    def __init__(
        self, model: Any, layers: Mapping[int, nn.Module], run: Run, group: RankGroup | None
    ) -> None:
        """
        Args:
            layers: the modules that call our attention.
            run: steps over a cache of ``blocks_needed`` blocks; all their logits.
            group: whose ranks all do the same.
        """
        self._model = model
        self._layers = layers
        self._run = run
        self._group = group
        self._precision = torch.finfo(model.dtype).eps
        self._heard: dict[int, list[Tensor]] = {}

    def holds(self, claim: bool) -> bool:
        """At every rank: all have to act alike."""
        return claim if self._group is None else bool(self._group.least(claim))

    @torch.inference_mode()
    def compute(self, script: Script, *, by_layer: bool = False) -> dict[int, Outputs]:
        """The logits, under ``HEAD``; by layer, what its attention puts out, where that can be told."""
        with self._listening(self._layers if by_layer else {}):
            ours = [self._step(step) for step in script.steps]
            try:
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

    def _step(self, feeds: list[Feed]) -> dict[int, Tensor]:
        self._hear(HEAD, self._run(StepInput([], np.zeros(0, np.int64), feeds))[None])
        count = sum(len(feed.tokens) for feed in feeds)  # beyond, batch-invariant numerics pad
        return {layer: output[:, :count] for layer, output in self._take().items()}

    def _theirs(self, script: Script) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """[num_paths, length, size] each."""
        ids = torch.tensor(script.paths, device=self._model.device)
        self._model.set_attn_implementation("eager")
        self._hear(HEAD, self._model(input_ids=ids, use_cache=False).logits)
        whole = self._take()
        last = ids[:, -SINGLES:].tensor_split(SINGLES, 1)  # few rows round otherwise than many
        again = self._again([ids[:, : script.cut], ids[:, script.cut : -SINGLES], *last])
        late = slice(None), slice(script.cut, None)
        suits = is_rounding(whole[HEAD][late], again[HEAD][late], self._precision)
        if not self.holds(suits):  # not their cache, at least
            again = self._again([ids])
        return whole, again

    def _again(self, pieces: Items[Tensor]) -> dict[int, Tensor]:
        """The same by another attention; several pieces go over transformers' cache."""
        for name in ("sdpa", WIDE):
            try:
                self._model.set_attn_implementation(name)
                cache = DynamicCache(config=self._model.config) if len(pieces) > 1 else None
                for piece in pieces:
                    output = self._model(input_ids=piece, past_key_values=cache, use_cache=cache is not None)
                    self._hear(HEAD, output.logits)
                break
            except ValueError:  # there is no such, or none that caps scores
                self._take()
        return self._take()

    @contextmanager
    def _listening(self, layers: Mapping[int, nn.Module]) -> Iterator[None]:
        def hook(layer: int) -> Callable[..., None]:
            def hear(module: nn.Module, arguments: Any, output: Any) -> None:
                first = output[0] if isinstance(output, tuple) else output
                if isinstance(first, Tensor) and first.ndim == 3:  # [texts, tokens, size], as of most
                    self._hear(layer, first)

            return hear

        handles = [module.register_forward_hook(hook(layer)) for layer, module in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hear(self, layer: int, output: Tensor) -> None:
        self._heard.setdefault(layer, []).append(output)

    def _take(self) -> dict[int, Tensor]:
        """What was heard since, along the texts."""
        heard, self._heard = self._heard, {}
        return {layer: torch.cat(parts, 1) for layer, parts in heard.items()}


def _wide_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The model's own eager attention, of numbers in a wider type."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    wider = WIDER[query.dtype]
    output, _ = eager(module, query.to(wider), key.to(wider), value.to(wider), mask, **kwargs)
    return output.to(query.dtype), None


AttentionInterface.register(WIDE, _wide_eager)
AttentionMaskInterface.register(WIDE, eager_mask)


@contextmanager
def short_windows(model: Any, context_length: int) -> Iterator[int | None]:
    """Meanwhile no sliding window is longer than ``WINDOW``; yields the one in force, None: there is none."""
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


def pick_tokens(config: Any) -> Iterator[int]:
    """Token ids in a fixed disorder, without those that stand for something else."""
    size = config.get_text_config().vocab_size
    named = [value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))]
    return cycle(
        [token for token in Random(0).sample(range(size), min(size, 4 * LENGTH)) if token not in named]
    )
