"""Gemma 4's assistant: a small draft that attends to the target's KV cache, and has no cache of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.choice_context import to_device
from outrider.decoding.draft import Draft
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.assistant_head import AssistantHead, TargetKeys, built, config_of
from outrider.engine.drafters.target_drafter import Target, TargetDrafter, last_state, rows_at
from outrider.engine.drafters.trees import Trees
from outrider.engine.forward.attention import Paged
from outrider.engine.forward.linear import optimize_for_cpu
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.sequence import UNKNOWN, EngineSequence
from outrider.engine.settings import EngineSettings


class Assistant(TargetDrafter):
    """Drafter of trees of any depth. It knows its own guesses only from the state that it feeds back."""

    hidden_layers = (-1,)

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        self._checkpoint = HeadCheckpoint(settings, name)
        self._config = config_of(self._checkpoint)
        if settings.tensor_parallel > 1:
            raise self._checkpoint.refusal(
                "it reads all heads of the target's keys, of which each rank has a share:"
                f" tensor_parallel={settings.tensor_parallel} must be 1"
            )
        self.weight_bytes = self._checkpoint.weight_bytes

    def load(self, target: Target) -> None:
        self._target = target
        model = target.model
        kinds = model.config.get_text_config().layer_types
        # The last layer of each kind: if layers share keys and values, it has the cache that they share.
        self._layers = {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in {*kinds}}
        self._head: AssistantHead = built(self._checkpoint, self._config).to(model.device, model.dtype)
        self._embedding = model.get_input_embeddings()
        if model.device.type == "cpu":
            optimize_for_cpu(self._head)
        del self._checkpoint

    def is_of_host(self, request: DraftRequest) -> bool:
        return self._target.device.type != "cpu"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        trees = Trees(requests)
        states = [last_state(requests[place]) for place in trees.growing]
        before = torch.stack(states) if states else None
        while before is not None:
            nodes = [requests[place].engine_sequence for place in trees.growing]
            after, logits = self._pass(nodes, trees.newest, before)
            going_on = trees.grow(logits)
            before = rows_at(after, going_on) if going_on else None
        self.top_tokens, self.promises = trees.top_tokens, trees.promises
        return trees.drafts()

    def _pass(
        self, nodes: Sequence[EngineSequence], tokens: list[int], states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns output states [num_nodes, hidden_size] and logits [num_nodes, vocab_size] of nodes.

        Args:
            nodes: sequence of each node. A node attends to the target's cache, and to no other node.
            tokens: [num_nodes] token ids.
            states: [num_nodes, hidden_size] input states: the target's, or those that the head returned.
        """
        target, cache = self._target, self._target.cache
        # Each node is a row at the last token in the target's cache; the row stores no keys or values.
        feeds = [Feed([UNKNOWN], 1, sequence.cached - 1, sequence.blocks, None) for sequence in nodes]
        fed = StepInput.of(target.tables, feeds, cache.take_changes())
        target.change_cache(fed)
        batch = target.lay_out(fed)
        keys = TargetKeys(Paged(batch, cache, target.kernel), self._layers)
        embeddings = self._embedding(to_device(torch.tensor(tokens), states.device))
        # All guesses have the position of the newest token.
        after = self._head(embeddings, states, batch.position_ids + 1, keys)
        return self._head.post_projection(after), self._head.logits(after)
