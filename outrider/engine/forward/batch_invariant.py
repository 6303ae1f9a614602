"""Batch invariance: the logits of a token have the same bits whatever else is computed with it.

The order in which a product is summed depends on its shape. The shape of a step depends on other sequences,
drafted tokens and the cuts of a prompt. So a step runs as passes of a fixed shape:

- every forward pass is padded to the same number of tokens. So all operations on single tokens (products,
  norms, activations) have fixed shapes, and the place of a token in the pass changes nothing;
- an attention kernel sums a row's context in a fixed order, whatever else it computes;
- a drafted token off the chain sees its path as if the path were a chain.

Results are equal in processes with the same libraries, kind of processor and number of threads. The ranks of
a tensor-parallel model run the same passes, and their parts are summed in the order of the ranks
(outrider/engine/parallel/sums.py).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.batch import Batch
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.forward.recurrent_layer import keeps_states
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
    """Step that runs as several passes, one after the other."""

    parts: list[Batch]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def path(self) -> Path:
        """Returns how the last pass is computed."""
        return self.parts[-1].path

    @property
    def choice(self) -> PackedRows | None:
        """Returns the rows that choose in all passes; the last pass holds them, since passes share memory."""
        return self.parts[-1].choice


@dataclass(frozen=True)
class PaddedPass(Batch):
    """Pass of PASS_TOKENS tokens; the last tokens may be padding, which belongs to no sequence."""

    num_real: int  # tokens without padding
    wanted: torch.Tensor  # int64 indices of the rows of logits that were asked for

    @property
    def num_tokens(self) -> int:
        return self.num_real

    def without_padding(self, output: ForwardOutput) -> ForwardOutput:
        hidden = None if output.hidden is None else output.hidden[: self.num_real]
        logits = output.logits[self.wanted] if len(self.wanted) else output.logits
        return replace(output, logits=logits, hidden=hidden, are_finite=output.are_finite[: self.num_real])


def cut(step: StepInput, rows: int) -> list[StepInput]:
    """Splits the tokens of a step, in order, into parts of ``rows`` tokens; the last part may have fewer.

    The first part has the new blocks of all parts. Changes of the cache before the step are left out.
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
    """Returns a feed's tokens from ``first`` to ``stop``, and the nodes of its Draft up to ``stop``."""
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
    """Makes a padded pass of a step with at most PASS_TOKENS tokens."""
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
    """Whether a module holds experts, judged by the names that transformers gives to experts."""
    return path.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__


def check_rows_are_apart(model: Any, name: str) -> None:
    """Checks that a model can be batch-invariant.

    Raises:
        UnsupportedModelError: a token's result depends on other tokens, beyond attention, in any shape.
    """
    if (reason := why_rows_mix(model)) is not None:
        raise UnsupportedModelError(f"batch_invariant=True with model={name!r}: {reason}")


def why_rows_mix(model: Any) -> str | None:
    """Returns why a token's result depends on other tokens beyond attention, in any shape; else None."""
    if keeps_states(model):
        return "its recurrent layers take a step whole, and not in passes of one shape"
    architecture = architecture_of(model)
    if architecture is not None and architecture.mixture is not None:
        return None  # experts are those of outrider/engine/forward/experts.py
    if any(are_experts(path, module) for path, module in model.named_modules()):
        return "how many tokens an expert multiplies at once depends on the others"
    return None
