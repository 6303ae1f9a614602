"""Decoding task: a step for each Draft, or a step for each token of plain decoding."""

from collections.abc import Sequence

from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, Verdict
from outrider.decoding.grammar import Constrained
from outrider.decoding.lease import Lease
from outrider.decoding.sampling import reads_text
from outrider.decoding.settings import TokenLogprobs
from outrider.decoding.verify import verify_block, verify_rejection
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.choosing.asked_logprobs import comes_along
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.choosing.sampler import Choices
from outrider.engine.sequence import NO_DRAFT, UNKNOWN, EngineSequence
from outrider.engine.tasks.task import Task
from outrider.engine.work import NOTHING_FORCED, Decoded, Forced, Result

NOTHING_CONSTRAINED = Constrained(NO_DRAFT, (), ())


class DecodeTask(Task):
    """Forward pass over the uncached tokens and every node of the Draft.

    Plain decoding has no Draft, and repeats passes until the lease or the generation ends.
    """

    def __init__(
        self,
        sequence: EngineSequence,
        draft: Draft,
        round: int,
        vocab_size: int,
        arrived: float,
        lease: Lease,
        is_plain: bool = False,
    ) -> None:
        """lease: lease of the work, which may be renewed meanwhile."""
        super().__init__(sequence, arrived)
        self.round = round
        self.lease = lease
        self.is_plain = is_plain
        # Whether coupled verification judges the Draft. In plain decoding its tokens are forced by a grammar.
        self._is_coupled = is_plain or sequence.sampling.verification == "coupled"
        self._draft = _fitting(draft, self._room - 1, vocab_size)  # the target adds one token of its own
        self._constrained: Constrained | None = None  # the Draft under the grammar, once applied
        self.next_draft: DraftRequest | None = None  # request for the Draft that comes with the Verdict
        # Whether a step needs the token of the previous step only as its input.
        self.is_foreseeable = (
            is_plain and not reads_text(sequence.sampling) and comes_along(sequence.sampling)
        )

    def take_draft(self, draft: Draft, arrived: float) -> bool:
        """Sets the tokens of the Draft whose pass was launched when only the shape of its tree was known.

        arrived: time by the engine's clock, from which timings count.

        Returns:
            whether the Draft has that tree. If not, the task must be dropped.
        """
        if draft.parents != self._draft.parents:
            return False
        self._draft, self._since = draft, arrived
        return True

    @property
    def _end(self) -> int:
        """Returns the length of the sequence at which the work ends."""
        limit = self.sequence.limit
        return min(self.lease.until, limit) if self.is_plain else limit

    @property
    def _room(self) -> int:
        """Returns the number of tokens by which the sequence may still grow."""
        return self._end - len(self.sequence.tokens)

    @property
    def ends_now(self) -> bool:
        """Whether the step under way chooses the last token, whatever that token is."""
        return self._room <= 1

    def next_row(self) -> ChoiceContext:
        """Returns the context of the next step's choice, if the task is foreseeable."""
        sequence = self.sequence
        generated = () if sequence.needs_no_text else sequence.tokens[sequence.prompt_length :]
        return sequence.row(generated, (UNKNOWN,))

    def tree(self) -> Draft:
        return self._draft

    def constrain(self) -> None:
        sequence = self.sequence
        if sequence.matcher is None or self._constrained is not None:
            return
        sequence.check_next_token()
        generated = sequence.tokens[sequence.prompt_length :]
        has_probs = not self._is_coupled
        self._constrained = sequence.matcher.constrained(generated, self._draft, self._room - 1, has_probs)
        self._draft = self._constrained.draft

    def give_up_draft(self) -> bool:
        had_draft = bool(self._draft)
        self._draft, self._constrained = NO_DRAFT, NOTHING_CONSTRAINED
        return had_draft

    def nodes(self) -> Sequence[int]:
        return range(ROOT, len(self._draft.tokens))

    @property
    def judged(self) -> Draft:
        return self._draft if self._is_coupled else NO_DRAFT

    def take(self, choices: Choices, cache: PagedCache) -> list[Result]:
        sequence = self.sequence
        verdict, finish = self.until_end(self._judge(self.valid_part(choices), choices))
        logprobs = choices.logprobs(verdict) if choices.contexts else ()
        self.kept = verdict.accepted
        cache.keep_path(sequence, verdict.accepted, has_moved=choices.has_moved)
        sequence.tokens += verdict.tokens
        decoded = self._decoded(verdict, logprobs, finish)
        if self.is_plain:
            self._draft, self._constrained = NO_DRAFT, None
            self.done = finish is not None or self._room <= 0
        else:
            self.next_draft = self._request(verdict, choices) if self.lease.depth else None
            self.done = True
        return [decoded]

    def _decoded(self, verdict: Verdict, logprobs: tuple[TokenLogprobs, ...], finish: str | None) -> Decoded:
        """Returns the answer to the Draft's sender.

        Accepted nodes have their indices in the sender's Draft. Tokens that the grammar forced are reported
        apart.
        """
        forced, constrained = NOTHING_FORCED, self._constrained
        if constrained is not None:
            kept = constrained.kept
            accepted = tuple(kept[node] for node in verdict.accepted if node < len(kept))
            forced = Forced(len(verdict.accepted) - len(accepted), constrained.forced)
            verdict = Verdict(accepted, verdict.tokens)
        return Decoded(
            self.sequence.number,
            self.round,
            verdict,
            logprobs,
            finish,
            self.timings(),
            len(self.sequence.tokens),
            is_plain=self.is_plain,
            forced=forced,
        )

    def foreseen_draft(self) -> DraftRequest | None:
        """Returns the request for a Draft after any Verdict of the step under way; None: no Draft can begin.

        Its depth is what a Verdict of a single token leaves room for. The judged Draft must be a chain, whose
        alternatives follow the root or a node of the chain before the last.
        """
        depth, of_chain = min(self.lease.depth, self._room - 2), self._draft.chain_length
        if (
            self.is_plain
            or depth <= 0
            or any(node >= of_chain - 1 for node in self._draft.parents[of_chain:])
        ):
            return None
        return self._asked(depth)

    def _request(self, verdict: Verdict, choices: Choices) -> DraftRequest | None:
        """Returns the request for the Draft that comes with this Verdict; None: no Draft is wanted."""
        depth = min(self.lease.depth, self._room - 1)
        if depth <= 0:
            return None
        row = 1 + verdict.accepted[-1] if verdict.accepted else 0
        hidden = None if choices.hidden is None else choices.hidden[row - len(choices.chosen)]
        return self._asked(depth, hidden)

    def _asked(self, depth: int, hidden: Tensor | None = None) -> DraftRequest:
        """Returns the request for a Draft of this depth. hidden: as in DraftRequest."""
        lease = self.lease
        # Other rules judge by the distribution that a token was drawn from; pruning by token would change it.
        least_survival = lease.least_survival if self._is_coupled else 0.0
        return DraftRequest(self.sequence, depth, lease.alternatives, self.round, hidden, least_survival)

    def _judge(self, draft: Draft, choices: Choices) -> Verdict:
        if self._is_coupled:
            return choices.verdict(len(draft.tokens))
        rule, rows = self.sequence.sampling.verification, slice(1 + len(draft))
        verify = verify_rejection if rule == "rejection" else verify_block
        position = len(self.sequence.tokens) - self.sequence.noise_origin
        return verify(draft, choices.target_probs()[rows], self.sequence.noise_key, position, self.round)


def _fitting(draft: Draft, depth: int, vocab_size: int) -> Draft:
    """Returns the nodes before the first node that is deeper than ``depth`` or outside the vocabulary."""
    if len(draft) <= depth and max(draft.tokens, default=0) < vocab_size:
        return draft
    nodes = zip(draft.tokens, draft.depths, strict=True)
    count = next(
        (i for i, (token, above) in enumerate(nodes) if above >= depth or token >= vocab_size), len(draft)
    )
    return draft.leading(count)
