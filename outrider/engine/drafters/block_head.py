"""Heads that draft all tokens of a block in one pass, from the target's states before the block.

Their cached keys and values depend on the target's states alone, not on tokens or guesses. So a partly
refused Draft needs no rollback, and a shared prefix is exact for each sequence. The rows of a block take the
cache slots after these states: the newest token, then mask tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.drafters.caching_drafter import CachingDrafter
from outrider.engine.drafters.target_drafter import CommittedStates, feed_of, rows_at
from outrider.engine.drafters.trees import Trees
from outrider.engine.forward.attention import Paged
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.parallel.drafter_step import DrafterStep
from outrider.engine.sequence import UNKNOWN


class BlockHead(CachingDrafter):
    """Head whose Drafts are no deeper than its block. The host chooses tokens position by position."""

    block_size: int  # rows of a block; all are fed if a row sees the rows after it
    num_guesses: int  # rows of a block that guess a token: the last rows
    mask_token: int
    looks_ahead: bool  # whether each row of a block also sees the rows after it
    memory_size: int  # size of the memory that each guess passes to the next guess

    def take_in(self, committed: Sequence[CommittedStates]) -> None:
        """Caches the states that may no longer be buffered: the next Draft attends to all earlier states."""
        committed = self._waiting.add(committed)
        if not committed:
            return
        # The head reads the states alone: the tokens are placeholders for their positions.
        feeds = [feed_of(part.sequence, [UNKNOWN] * len(part.hidden), part.start) for part in committed]
        states = self._states_before(committed)
        step = DrafterStep(StepInput.of(self._target.tables, feeds), len(states), wants_logits=False)
        self._on_all_ranks(step, states)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        limited = [*map(self._limited, requests)]
        trees = Trees(limited, is_free=True)
        blocks = [self._block(limited[place]) for place in trees.growing]
        if blocks:
            states, logits = self._read_blocks(blocks)
            rows = [*accumulate((block.num_logits for block in blocks[:-1]), initial=0)]
            memory = states.new_zeros(len(rows), self.memory_size)
            while rows:
                of_rows, newest = rows_at(states, rows), trees.newest
                corrected, memory = self._after_tokens(of_rows, rows_at(logits, rows), newest, memory)
                followed = trees.grow(corrected, confidences=self._confidences(of_rows, newest))
                rows, memory = [rows[row] + 1 for row in followed], rows_at(memory, followed)
        self.top_tokens, self.promises = trees.top_tokens, trees.promises
        return trees.drafts()

    def is_of_host(self, request: DraftRequest) -> bool:
        return self._target.device.type != "cpu"

    def _limited(self, request: DraftRequest) -> DraftRequest:
        """Returns the request, limited to a block; its depth is 0 if the cache has no room for a block."""
        sequence = request.engine_sequence
        has_room = self._target.cache.reserve(sequence, sequence.cached + self.block_size)
        return replace(request, depth=min(request.depth, self.num_guesses) if has_room else 0)

    def _block(self, request: DraftRequest) -> Feed:
        """Returns the feed of the block rows that the Draft needs."""
        sequence, guesses = request.engine_sequence, self.num_guesses
        if not self.looks_ahead:
            guesses = request.depth  # no row sees the rows that are left out
        masks = [self.mask_token] * (self.block_size - self.num_guesses + guesses - 1)
        tokens, start, blocks = [sequence.tokens[-1], *masks], sequence.cached, sequence.blocks
        return Feed(tokens, guesses, start, blocks, None, looks_ahead=self.looks_ahead)

    def _read_blocks(self, blocks: Sequence[Feed]) -> tuple[Tensor, Tensor]:
        """Returns states and logits [num_rows, ...] of the rows that guess, block after block."""
        step = DrafterStep(StepInput.of(self._target.tables, blocks))
        no_states = self._target.model.get_input_embeddings().weight.new_empty(0, self.state_size)
        return self._on_all_ranks(step, no_states)

    def _compute(self, step: DrafterStep, states: Tensor) -> tuple[Tensor, Tensor]:
        paged = Paged(self._target.lay_out(step.fed), self._cache, self._target.kernel)
        if not step.wants_logits:
            self._store(states, paged)
            return states, states.new_empty(0, 0)
        after = self._forward(paged)[paged.batch.logit_rows]
        return after, self._logits(after)

    def _confidences(self, states: Tensor, tokens: list[int]) -> Tensor | None:
        """Returns the head's own logits [num_rows] that its guesses are correct; None: it gives none.

        Arguments: as for ``_after_tokens``.
        """
        return None

    @abstractmethod
    def _store(self, states: Tensor, paged: Paged) -> None:
        """Caches each layer's keys and values of states [num_tokens, state_size]."""

    @abstractmethod
    def _forward(self, paged: Paged) -> Tensor:
        """Returns the output states of the rows of blocks: [num_rows, state_size]."""

    @abstractmethod
    def _logits(self, states: Tensor) -> Tensor:
        """Returns at rank 0 logits [num_rows, num_known] of the tokens that the head knows."""

    @abstractmethod
    def _after_tokens(
        self, states: Tensor, logits: Tensor, tokens: list[int], memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns logits [num_rows, vocab_size] of guesses, corrected by the token before each guess.

        It also returns the memory for the next guesses, [num_rows, memory_size].

        Args:
            states: [num_rows, state_size] output states of the rows.
            logits: [num_rows, num_known] logits of the rows.
            tokens: [num_rows] id of the token before each guess: drafted, or the last committed token.
            memory: [num_rows, memory_size] memory of the previous guess; zero for the first guess.
        """
