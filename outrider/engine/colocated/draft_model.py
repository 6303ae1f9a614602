"""Drafting with a smaller model that shares the target's vocabulary, in the target's process."""

import logging
from collections.abc import Sequence
from itertools import count

from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.outcomes import Branch
from outrider.engine.choosing.draft_request import DraftedSequence, DraftRequest
from outrider.engine.choosing.step_result import StepResult
from outrider.engine.drafters.chain_drafter import choice_of
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.drafters.drafts_under_way import DraftRead
from outrider.engine.drafters.target_drafter import Judging, feed_of
from outrider.engine.inputs.paged_input import FEW_QUERIES
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.validation import check_work
from outrider.engine.sequence import UNKNOWN, EngineSequence
from outrider.engine.tasks.propose import extended, top_tokens_of
from outrider.engine.work import Failed, Propose, Proposed, Result

logger = logging.getLogger(__name__)


class DraftModel(Drafter):
    """Draft model with its own engine, whose cache follows each drafted sequence."""

    def __init__(
        self, draft: Engine, vocab_size: int | None = None, forward: ForwardPass | None = None
    ) -> None:
        """
        Args:
            vocab_size: number of token ids of the target; the draft may have more. None: the draft's number.
            forward: passes of the draft; None: no Draft begins before its Verdict is known.
        """
        self._draft, self._forward = draft, forward
        self._only_drafts = range(vocab_size or draft.vocab_size, draft.vocab_size)
        self._sequences: dict[DraftedSequence, EngineSequence] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Makes all Drafts together, with a step for each position, after the steps that prompts need."""
        return self.propose_within(None, requests)

    def propose_within(self, most_steps: int | None, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Returns the Drafts that are complete after ``most_steps`` steps; all other Drafts are empty.

        An incomplete sequence keeps the tokens cached so far, and continues with its next request.
        """
        drafts: dict[DraftedSequence, Draft] = {}
        sequences = {
            number: request.sequence for request in requests if (number := self._submit(request)) is not None
        }
        for step in count():
            if step == most_steps or not self._draft.has_work:
                break
            for result in self._draft.step():
                self._take(result, sequences, drafts)
        return [drafts.get(request.sequence, Draft()) for request in requests]

    def top_tokens_of(self, sequence: DraftedSequence, draft: Draft) -> tuple[tuple[int, ...], ...]:
        """Returns the top tokens at each position of the sequence's newest Draft, best first."""
        tokens = draft.tokens[: draft.chain_length]
        return top_tokens_of(self._sequences[sequence], tokens) if tokens else ()

    def with_room_after(self, judging: Sequence[Judging]) -> list[Judging]:
        """Returns the sequences that have cache for a chain after any Verdict.

        Tokens that the model has not read are fed in the pass that begins the chains. So a new sequence
        prefills its prompt while other sequences begin their chains, and no sequence waits for it. All
        prompts together get the tokens of a chunk.
        """
        found, left = list[Judging](), self._draft.settings.prefill_chunk
        assert left is not None  # resolved settings leave no value open
        for part in judging:
            unread = self._unread_before(part)
            if unread is None or unread > max(FEW_QUERIES, left):
                continue
            left -= unread if unread > FEW_QUERIES else 0
            found.append(part)
        return found

    def _unread_before(self, judging: Judging) -> int | None:
        """Reserves cache for a chain; returns how many tokens are fed before it. None: it cannot begin."""
        request, cache = judging.request, self._draft.runner.cache
        tokens = request.sequence.tokens
        try:
            held = self._held(request.sequence)
            unseen = Propose(held.number, len(held.tokens), (*tokens[len(held.tokens) :],), request.depth, 0)
            check_work(held, unseen, self._draft.vocab_size)
        except ValueError as error:  # as in _submit
            logger.debug("no Draft for a text of %d tokens: %s", len(tokens), error)
            return None
        end = len(tokens) + 1 + judging.draft.chain_length
        is_free = held.needs_no_text and not self._draft.works_on(held)
        if not is_free or end + request.depth > self._draft.max_length:
            return None
        if not held.tokens:
            held.tokens += tokens
            cache.adopt_prefix(held)
        return end - held.cached if cache.reserve(held, end + request.depth) else None

    def begin_after(
        self, judging: Sequence[Judging], result: StepResult[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Launches chains after the Verdicts that the device has found.

        judging: result of ``with_room_after``.

        Returns:
            as ``ForwardPass.drafted_after``.
        """
        assert self._forward is not None
        feeds = []
        for part in judging:
            tokens, held = part.request.sequence.tokens, self._sequences[part.request.sequence]
            held.forget_pending()  # the feed includes the accepted pending tokens
            held.tokens += tokens[len(held.tokens) :]
            fed = [*tokens[held.cached :], *part.told_tokens]
            feeds.append(feed_of(held, fed, held.cached, num_logits=1))
        requests = [part.request for part in judging]
        positions = max(request.depth for request in requests)
        return self._forward.drafted_after(feeds, choice_of(requests, (UNKNOWN,)), result, positions)

    def with_alternatives(self, read: DraftRead, request: DraftRequest) -> Draft:
        """Returns the chain of a Draft that was begun, with the requested alternatives added."""
        tokens = read.draft.tokens
        nodes = [
            (each.accepted - 1, read.top_tokens[each.accepted][each.rank])
            for each in self.branches(request)
            if each.accepted < len(tokens) and each.rank < len(read.top_tokens[each.accepted])
        ]
        return extended(read.draft, nodes)

    def branches(self, request: DraftRequest) -> list[Branch]:
        """Returns the alternatives that a chain may have."""
        held = self._sequences[request.sequence]
        return self._draft.alternatives(held, request.depth, request.alternatives)

    def keep(self, sequence: EngineSequence) -> None:
        """Commits the cached tokens of a sequence's newest Verdict, after which its Draft was begun."""
        held = self._sequences[sequence]
        held.tokens += sequence.tokens[len(held.tokens) :]
        held.cached = len(held.tokens)
        self._draft.runner.cache.publish(held)

    def clear(self, sequence: EngineSequence) -> None:
        """Clears the cache entries after the committed cached tokens, because they are not finite."""
        held = self._sequences[sequence]
        self._draft.runner.cache.clear(held, held.cached)

    def _submit(self, request: DraftRequest) -> int | None:
        """Submits a request; returns the number of the model's sequence. None: the model cannot read it."""
        sequence = request.sequence
        try:
            held = self._held(sequence)
            base = len(held.tokens)
            tokens = tuple(sequence.tokens[base:])
            work = Propose(held.number, base, tokens, request.depth, request.round, request.alternatives)
            self._draft.submit(work)
        except ValueError as error:  # a token or a setting outside the draft's vocabulary
            logger.debug("no Draft for a text of %d tokens: %s", len(sequence.tokens), error)
            return None
        return held.number

    def _take(
        self, result: Result, sequences: dict[int, DraftedSequence], drafts: dict[DraftedSequence, Draft]
    ) -> None:
        if isinstance(result, Failed):
            self._sequences = {
                sequence: held for sequence, held in self._sequences.items() if held.number != result.sequence
            }
        elif isinstance(result, Proposed) and result.sequence in sequences:
            drafts[sequences[result.sequence]] = result.draft

    def _held(self, sequence: DraftedSequence) -> EngineSequence:
        if sequence not in self._sequences:
            banned = (*sequence.sampling.bad_token_ids, *self._only_drafts)
            changed = {"logprobs": None, "bad_token_ids": banned}
            if sequence.matcher is not None:
                changed["grammar"] = None  # the target's engine has compiled it
            sampling = sequence.sampling.model_copy(update=changed)
            held = self._draft.open(sequence.prompt_length, sequence.noise_key, sampling)
            if sequence.matcher is not None:
                held.matcher = sequence.matcher.at_beginning(self._draft.vocab_size)
            self._sequences[sequence] = held
        return self._sequences[sequence]

    def forget(self, sequence: DraftedSequence) -> None:
        """Frees the sequence's cache."""
        if sequence in self._sequences:
            self._draft.close(self._sequences.pop(sequence))
