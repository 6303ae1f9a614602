"""Gemma 4's assistant: a small draft that reads the target's own cache, and caches nothing itself."""

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
    """Drafter with trees of any depth. Only the state that it feeds back knows its own guesses."""

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
        # Its last layer of a kind holds what the layers before it share, if layers share keys.
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
        """Returns states after nodes [num_nodes, hidden_size], and logits [num_nodes, vocab_size] after them.

        Args:
            nodes: sequence of each node. Nodes see what the target has cached, and no other node.
            tokens: [num_nodes] token ids.
            states: [num_nodes, hidden_size] the target's, or those that the head has fed back.
        """
        target, cache = self._target, self._target.cache
        # A row that stores nothing stands for each node, at the last token that the target has cached.
        feeds = [Feed([UNKNOWN], 1, sequence.cached - 1, sequence.blocks, None) for sequence in nodes]
        fed = StepInput.of(target.tables, feeds, cache.take_changes())
        target.change_cache(fed)
        batch = target.lay_out(fed)
        keys = TargetKeys(Paged(batch, cache, target.kernel), self._layers)
        embeddings = self._embedding(to_device(torch.tensor(tokens), states.device))
        # The position is that of the newest token, for all guesses.
        after = self._head(embeddings, states, batch.position_ids + 1, keys)
        return self._head.post_projection(after), self._head.logits(after)
