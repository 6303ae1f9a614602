"""P-EAGLE: an EAGLE-3 head that guesses all tokens of a Draft in one pass, from mask tokens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.eagle3 import Eagle3
from outrider.engine.drafters.target_drafter import Target, feed_of, rows_at
from outrider.engine.drafters.trees import Trees, with_room
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.settings import EngineSettings


class PEagle(Eagle3):
    """P-EAGLE drafter. Masks take the cache slots after the newest token; later tokens overwrite them."""

    kind = "peagle"
    is_fed_back = False

    def __init__(self, settings: EngineSettings, name: str) -> None:
        super().__init__(settings, name)
        checkpoint, mask_token = self._checkpoint, self._shape.mask_token
        own = checkpoint.tensors.get("embed_tokens.weight")
        tokens = checkpoint.target.vocab_size if own is None else len(own)
        if mask_token is None or not 0 <= mask_token < tokens:
            raise checkpoint.refusal(
                f"mask_token_id={mask_token} must be below {tokens}, the embedding's tokens"
            )
        self._mask_token: int = mask_token

    def load(self, target: Target) -> None:
        super().load(target)
        assert self._head.mask_hidden is not None
        self._mask_state = self._head.reduce(self._head.mask_hidden.view(1, len(self.hidden_layers), -1))

    def is_of_host(self, request: DraftRequest) -> bool:
        return self._target.device.type != "cpu"

    def _limited(self, request: DraftRequest) -> DraftRequest:
        """Returns the request, limited to the cache's room for its masks. Alternatives need no slots."""
        chain = with_room(replace(request, alternatives=0), self._target.cache, unwritten=1)
        return replace(chain, alternatives=request.alternatives)

    def _grown(self, requests: Sequence[DraftRequest]) -> Trees:
        """Makes Drafts with a pass over the newest token and the masks after it."""
        trees = Trees(requests, is_free=True)
        asked = [requests[place] for place in trees.growing]
        if asked:
            states = torch.cat([self._states_of_rows(request) for request in asked])
            step = DrafterStep(StepInput.of(self._target.tables, [*map(self._rows, asked)]), len(states))
            _, logits = self._on_all_ranks(step, states)
            rows = [*accumulate((request.depth for request in asked[:-1]), initial=0)]
            while rows:
                rows = [rows[row] + 1 for row in trees.grow(rows_at(logits, rows))]
        return trees

    def _rows(self, request: DraftRequest) -> Feed:
        sequence = request.engine_sequence
        tokens = [sequence.tokens[-1]] + [self._mask_token] * (request.depth - 1)
        return feed_of(sequence, tokens, sequence.cached - 1, num_logits=request.depth)

    def _states_of_rows(self, request: DraftRequest) -> Tensor:
        newest = self._newest[request.sequence][None]
        return torch.cat([newest, self._mask_state.expand(request.depth - 1, -1)])
