"""Logits of a token that do not depend, bit for bit, on what else is computed with it.

How a product is split up and added depends on its shape, and the shape of a step on its company: other
sequences, drafted tokens, how a prompt was cut. So a step runs as passes of one shape:

- every forward pass has as many tokens, padded: all that a model does to tokens one by one (products, norms,
  activations) always has the same shape, and where in it a token lies changes nothing;
- a kernel of attention adds up a row's context in one order, whatever is computed beside it;
- a drafted token that branches off sees its path as if it were a chain.

A result is the same among processes with the same libraries, kind of processor and number of threads. The
ranks of a tensor-parallel model run the same passes, and add up in the order of their numbers
(outrider/engine/parallel/sums.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.delta_net import keeps_states
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables
from outrider.engine.inputs.choice_input import ChoiceInput, PackedRows
from outrider.engine.inputs.paged_input import PagedInput, PagedLayout, fill
from outrider.engine.inputs.step_input import NOTHING_FED, Feed, StepInput
from outrider.engine.models.registry import architecture_of
from outrider.engine.step_timings import Path

# Tokens of a pass, by the kind of device: a GPU takes hardly longer for 64 than for a single token.
PASS_TOKENS = {"cpu": 16, "cuda": 64}


@dataclass(frozen=True)
class Passes:
    """A step as passes that run one after the other."""

    parts: list[Batch]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def path(self) -> Path:
        """Returns the way in which the last pass is computed."""
        return self.parts[-1].path

    @property
    def choice(self) -> PackedRows | None:
        """Returns the rows that choose, of the last pass; it may take the memory of earlier passes."""
        return self.parts[-1].choice


@dataclass(frozen=True)
class PaddedPass(Batch):
    """Holds PASS_TOKENS of its device, of which the last may be padding that belongs to no sequence."""

    num_real: int  # tokens
    wanted: torch.Tensor  # int64: of its rows of logits, those that were asked for

    @property
    def num_tokens(self) -> int:
        return self.num_real

    def without_padding(self, output: ForwardOutput) -> ForwardOutput:
        hidden = None if output.hidden is None else output.hidden[: self.num_real]
        logits = output.logits[self.wanted] if len(self.wanted) else output.logits
        return replace(output, logits=logits, hidden=hidden, are_finite=output.are_finite[: self.num_real])


def cut(step: StepInput, rows: int) -> list[StepInput]:
    """Returns the parts of the step's tokens in order; all but the last are full.

    The first part brings the new blocks of all. No part changes the cache before it.
    """
    parts: list[list[Feed]] = []
    room = 0
    for feed in step.feeds:
        first = 0
        while first < len(feed.tokens):
            if not room:
                parts.append([])
                room = rows
            stop = min(first + room, len(feed.tokens))
            parts[-1].append(_part(feed, first, stop))
            room -= stop - first
            first = stop
    new = [step.new_blocks, *[NOTHING_NEW] * len(parts)]
    return [replace(NOTHING_FED, feeds=part, new_blocks=own) for part, own in zip(parts, new, strict=False)]


def _part(feed: Feed, first: int, stop: int) -> Feed:
    """Returns its tokens from ``first`` to ``stop``, and its Draft's nodes up to there."""
    count, nodes = len(feed.tokens), 0 if feed.tree is None else len(feed.tree) - (len(feed.tokens) - stop)
    return Feed(
        feed.tokens[first:stop],
        max(stop - max(first, count - feed.num_logits), 0),
        feed.start + first,
        feed.blocks,
        None if feed.tree is None or nodes <= 0 else feed.tree.leading(nodes),
        feed.adapter,
    )


def padded_pass(
    step: StepInput, tables: BlockTables, dtype: torch.dtype, choice: ChoiceInput | None = None
) -> PaddedPass:
    """Makes a pass of a step that fits into it."""
    fitting, rows = PagedLayout.of(step), PASS_TOKENS[tables.device.type]
    room = PagedLayout.padded(rows, as_chains=True)
    longest = max(max(feed.tree.depths) + 1 if feed.tree else 0 for feed in step.feeds)
    path_length = max(room.path_length, longest)
    layout = replace(room, lanes=fitting.lanes, new_blocks=fitting.new_blocks, path_length=path_length)
    fields = fill(layout, step, tables, choice).sent()
    given = PagedInput.of(fields, tables.on_device)
    return PaddedPass(
        given.token_ids,
        given.position_ids,
        given.slots,
        torch.arange(rows if fitting.logits else 0, device=tables.device),
        [],
        tables.block_size,
        dtype,
        given,
        None if choice is None else choice.at(fields),
        fitting.rows,
        given.logit_rows[: fitting.logits],
    )


def are_experts(path: str, module: Any) -> bool:
    """Whether a token chooses between the module's weights, by the names that transformers gives such."""
    return path.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__


def check_rows_are_apart(model: Any, name: str) -> None:
    """
    Raises:
        UnsupportedModelError: one token's result depends on others beyond attention, whatever the shape.
    """
    if (reason := why_rows_mix(model)) is not None:
        raise UnsupportedModelError(f"batch_invariant=True with model={name!r}: {reason}")


def why_rows_mix(model: Any) -> str | None:
    """Returns why a token's result depends on others beyond attention in any shape; None: it does not."""
    if keeps_states(model):
        return "its recurrent layers take a step whole, and not in passes of one shape"
    architecture = architecture_of(model)
    if architecture is not None and architecture.mixture is not None:
        return None  # experts are those of outrider/engine/forward/experts.py
    if any(are_experts(path, module) for path, module in model.named_modules()):
        return "how many tokens an expert multiplies at once depends on the others"
    return None
