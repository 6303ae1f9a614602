"""MTP with a layer for each position of a Draft, as DeepSeek-V3 defines it for several layers.

Layer k predicts the token k + 2 positions after its input state. Its cache slot of a position holds what it
computes from the state of layer k - 1 there, and from the token k + 1 positions later. So the last k slots of
a layer stay empty until their tokens are known. A Draft fills them with drafted tokens: each layer passes
over the whole tree so far.

A sequence that adopted a cached prefix has no layer states at the end of that prefix. It drafts less deep
until each layer has processed a token of the sequence itself.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024; for chains the MtpModel of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.drafters.mtp import Mtp
from outrider.engine.drafters.mtp_checkpoint import MtpCheckpoint, after
from outrider.engine.drafters.target_drafter import CommittedStates, feed_of, rows_at
from outrider.engine.drafters.trees import Trees, with_room
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.attention import Paged
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.settings import EngineSettings


def mtp_drafter(settings: EngineSettings, name: str) -> Mtp:
    """Returns the drafter that uses a target's own MTP layers, whether a single layer or several.

    Raises:
        UnsupportedModelError: there is no such layer, or a checkpoint is given.
    """
    if (given := settings.drafters[name].checkpoint) is not None:
        raise UnsupportedModelError(
            f"drafters.{name}.checkpoint={given!r} for model={settings.model!r}: the layer is in the"
            " target's checkpoint, so give none"
        )
    checkpoint = MtpCheckpoint(settings)
    kind = Mtp if checkpoint.num_layers == 1 else LayeredMtp
    return kind(settings, name, checkpoint)


@dataclass(frozen=True)
class _NewestOfLayers:
    """Newest output state of each layer that has processed a token of the sequence."""

    end: int  # number of tokens that the first layer has processed
    states: Sequence[Tensor]  # [state_size] each


class LayeredMtp(Mtp):
    """Drafter whose Drafts are no deeper than the number of MTP layers."""

    def __init__(self, settings: EngineSettings, name: str, checkpoint: MtpCheckpoint) -> None:
        super().__init__(settings, name, checkpoint)
        self._newest_of: dict[DraftedSequence, _NewestOfLayers] = {}

    def capture(self) -> tuple[str, ...]:
        """Captures nothing: the passes of later layers have no graphs."""
        return ()

    def graph_bytes(self, rows: int, feeds: int, chains: int) -> int:
        return 0

    def is_of_host(self, request: DraftRequest) -> bool:
        return self._target.device.type != "cpu"

    def take_in(self, committed: Sequence[CommittedStates]) -> None:
        """Runs each layer over the states that may no longer be buffered, as far as tokens are known."""
        committed = self._waiting.add(committed)
        if not committed:
            return
        befores = [self._states_up_to(part) for part in committed]
        rows = [*self._states_before(committed).split_with_sizes([len(part.hidden) for part in committed])]
        newest: list[list[Tensor]] = [[] for _ in committed]
        for layer in range(len(self.cache_shapes)):
            if layer:  # shifted by 1: the newest state of layer - 1 waits until its token is known
                rows = [
                    torch.cat([*(state[None] for state in before[layer - 1 : layer]), states[:-1]])
                    for before, states in zip(befores, rows, strict=True)
                ]
            rows = self._passed(layer, committed, rows)
            for found, states in zip(newest, rows, strict=True):
                found += states[-1:].clone().unbind()
        for part, states_of in zip(committed, newest, strict=True):
            self._newest_of[part.sequence] = _NewestOfLayers(part.start + len(part.hidden), states_of)

    def _states_up_to(self, part: CommittedStates) -> Sequence[Tensor]:
        """Returns each layer's newest state, if it belongs to the last token before a part; else none."""
        newest = self._newest_of.get(part.sequence)
        return newest.states if newest is not None and newest.end == part.start else ()

    def _passed(
        self, layer: int, committed: Sequence[CommittedStates], rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Runs a layer over the last tokens of each part, and returns its output states.

        rows: input states of these tokens, [num_tokens, state_size] each.
        """
        feeds = []
        for part, states in zip(committed, rows, strict=True):
            end, sequence = part.start + len(part.hidden) + 1, part.sequence
            if count := len(states):
                feeds.append(feed_of(sequence, sequence.tokens[end - count : end], end - count - 1 - layer))
        if not feeds:
            return [*rows]
        before = torch.cat([*rows])
        step = DrafterStep(StepInput.of(self._target.tables, feeds), len(before), layer, wants_logits=False)
        after_all, _ = self._on_all_ranks(step, before)
        return [*after_all.split_with_sizes([len(states) for states in rows])]

    def _limited(self, request: DraftRequest) -> DraftRequest:
        newest, layers = self._newest_of.get(request.sequence), 0
        if newest is not None and newest.end == request.engine_sequence.cached:
            layers = min(len(newest.states) + 1, len(self.cache_shapes))
        limited = replace(request, depth=min(request.depth, layers))
        return with_room(limited, self._target.cache, unwritten=1)

    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts; each further layer makes a pass over all nodes so far."""
        trees = Trees(requests)
        if not trees.growing:
            return trees
        newest = [self._newest_of[request.sequence].states for request in requests]
        states = torch.stack([newest[index][0] for index in trees.growing])
        _, logits = self._on_all_ranks(DrafterStep(num_states=len(states)), states)
        fed: dict[int, Tensor] = {}  # previous layer's output states of its fed nodes, by Draft
        layer = 0
        while trees.grow(logits):
            feeds = trees.whole_feeds(layer + 1)
            before = [
                _states_of_nodes(feed, newest[index][layer], fed.get(index)) for index, feed in feeds.items()
            ]
            layer += 1
            fed_now = StepInput.of(self._target.tables, [*feeds.values()])
            step = DrafterStep(fed_now, sum(map(len, before)), layer)
            states, logits = self._on_all_ranks(step, torch.cat(before))
            fed = dict(zip(feeds, states.split_with_sizes([*map(len, before)]), strict=True))
        return trees

    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        rows = states
        if step.fed.feeds:
            batch = self._target.lay_out(step.fed)
            paged = Paged(batch, self._cache, self._target.kernel)
            given = self._model, states[None], batch.token_ids, batch.position_ids, paged
            states = after(*given, step.part)[0].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            rows = states[batch.logit_rows]
        logits = self._logits(rows) if step.wants_logits else states.new_empty(0, 0)
        return states, logits

    def forget(self, sequence: DraftedSequence) -> None:
        super().forget(sequence)
        self._newest_of.pop(sequence, None)


def _states_of_nodes(feed: Feed, newest: Tensor, fed: Tensor | None) -> Tensor:
    """Returns the input states of the nodes of a feed: [num_nodes, state_size].

    Args:
        newest: [state_size] state after the last committed token, which the nodes without a parent read.
        fed: [num_fed, state_size] output states of the leading nodes; None: no node was fed before.
    """
    parents = range(-1, len(feed.tokens) - 1) if feed.tree is None else feed.tree.parents
    known = newest[None] if fed is None else torch.cat([newest[None], fed])
    return rows_at(known, [parent + 1 for parent in parents])
