"""Grammars: which tokens may come next in an answer with a prescribed structure. Torch-free.

A grammar is a string that llguidance accepts: a JSON schema, a regular expression or a Lark grammar, wrapped
by llguidance's own functions. The allowed tokens depend on this string and the answer so far, and on nothing
else. So the target, a draft and a restarted worker agree.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from outrider.decoding.draft import ROOT, Draft, SparseProbs

Mask = NDArray[np.int32]  # [ceil(vocab_size / 32)], a set bit for each allowed token, lowest bits first

MAX_GRAMMAR = 2**17  # characters
MAX_FORCED = 16  # most forced tokens that are added to one Draft
MASKS_S = 0.01  # seconds of CPU time for the masks of one Draft; the Draft is truncated to stay within it
FIRST_TOKENS = 4  # tokens that a new grammar consumes on trial, to find limits that it exceeds late
MAX_REASON = 300  # most characters of an error message, which may quote the whole grammar
# A grammar that exceeds a limit is refused when it is compiled, or fails its own sequence later. The limits
# bound the cost of a step: 100,000 units of lexer fuel take about 7 ms, and 20,000 items about 1 ms. 20,000
# states take about 40 MB.
LIMITS: Final = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar cannot be compiled, exceeds a limit, or contradicts the committed tokens."""


def token_table(tokenizer: str, vocab_size: int, end_token_ids: Iterable[int]) -> LLTokenizer:
    """Returns a vocabulary for grammars. This takes two seconds for 131k tokens, and holds the GIL.

    Args:
        tokenizer: text of tokenizer.json.
        vocab_size: size of the model's vocabulary, whose embeddings may be padded.
        end_token_ids: end tokens of the model; if empty, the tokenizer's end token.
    """
    ends = sorted(end_token_ids)
    known = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends or None, slices=[])
    return LLTokenizer(TokenizerWrapper(_Spelling(known)), n_vocab=vocab_size, eos_token=known.eos_tokens)


class _Spelling:
    """Vocabulary for llguidance whose tokenizer never turns text into a mark.

    A mark is an added special token such as <tool_call>. llguidance does not match a mark as text, but its
    own tokenizer turns forced text that spells a mark into the mark. It would then refuse the only allowed
    token.
    """

    bos_token_id = None

    def __init__(self, known: LLTokenizer) -> None:
        self._known = known
        vocabulary = range(known.vocab_size)
        self.eos_token_id = known.eos_token
        self.tokens = [known.decode_bytes([token]) for token in vocabulary]
        self.special_token_ids = [token for token in vocabulary if known.is_special_token(token)]
        self._marks = {*self.special_token_ids}

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of a text. Text that spells a mark is split after its first character."""
        tokens = self._known.tokenize_bytes(text)
        marks = {self.tokens[token].decode() for token in tokens if token in self._marks}
        if not marks:
            return tokens
        whole = text.decode()
        begins = re.finditer(f"(?=(?:{'|'.join(map(re.escape, marks))})).", whole, re.DOTALL)
        cuts = [0, *(begin.end() for begin in begins), len(whole)]
        return [token for start, end in pairwise(cuts) for token in self._part(whole[start:end])]

    def _part(self, text: str) -> list[int]:
        tokens = self._known.tokenize_str(text)
        return tokens if self._marks.isdisjoint(tokens) else self._known.greedy_tokenize(text)


def compiled(grammar: str, tokens: LLTokenizer) -> LLMatcher:
    """Compiles a grammar. Other threads can run meanwhile; LIMITS bound the work.

    Raises:
        GrammarError: the grammar cannot be compiled; the message says why.
    """
    if len(grammar) > MAX_GRAMMAR:
        raise GrammarError(f"{len(grammar)} characters, at most {MAX_GRAMMAR} are accepted")
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    _check(matcher)
    copy = matcher.deep_copy()
    for _ in range(FIRST_TOKENS):  # some grammars exceed a limit only after a few tokens
        mask = np.frombuffer(copy.compute_bitmask(), np.uint8)
        lowest = int(np.unpackbits(mask, bitorder="little").argmax())
        has_gone_on = not copy.is_error() and copy.try_consume_tokens([lowest])
        _check(copy)
        if not has_gone_on:
            break
    return matcher


@dataclass(frozen=True)
class Constrained:
    """Draft without the nodes that a grammar refuses, plus the tokens that it forces after the chain."""

    draft: Draft
    kept: tuple[int, ...]  # nodes of the given Draft that are the first nodes of ``draft``, in this order
    forced: tuple[int, ...]  # nodes of the given Draft that the grammar forces


class Matcher:
    """Grammar state of one answer: consumes committed tokens, and tries drafted tokens after them."""

    def __init__(self, compiled: LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """Creates the state at the beginning of an answer.

        Args:
            compiled: grammar in its initial state; it is not modified.
            end_token_ids: tokens that end the generation; the grammar does not continue after them.
        """
        self._compiled = compiled
        self._committed, self._tokens = compiled.deep_copy(), list[int]()  # state after the committed tokens
        self._drafted, self._path = compiled.deep_copy(), list[int]()  # state after drafted tokens too
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._ends = end_token_ids
        self._mask_s = 0.0  # seconds of CPU time per mask, at the last call of ``masks``

    def at_beginning(self, vocab_size: int) -> "Matcher":
        """Returns a matcher of another answer under the same grammar, for a model with this vocabulary."""
        return Matcher(self._compiled, vocab_size, self._ends)

    def masks(self, generated: list[int], draft: Draft, nodes: Iterable[int]) -> list[Mask | None]:
        """Returns the mask after each of these nodes, or ROOT; None if the grammar refuses a node's path.

        generated: committed tokens, without the prompt.

        Raises:
            GrammarError: the committed tokens contradict the grammar, or it exceeds a limit.
        """
        started = time.thread_time()
        self._commit(generated)
        masks = [self._mask() if self._go(_tokens_to(draft, node)) else None for node in nodes]
        self._mask_s = (time.thread_time() - started) / max(len(masks), 1)
        return masks

    def may_end(self, generated: list[int], token: int) -> bool:
        """Whether the token that ends the generation may follow these tokens.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        return allows(self._mask(), token)

    def forced(self, generated: list[int], drafted: list[int]) -> list[int]:
        """Returns the forced continuation of these tokens: each token of it is the only allowed token.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        if not self._go(drafted):
            return []
        return list(self._drafted.compute_ff_tokens())

    def constrained(
        self, generated: list[int], draft: Draft, room: int, has_probs: bool = False
    ) -> Constrained:
        """Returns the part of a Draft that the grammar allows, plus the forced tokens after its chain.

        Rejection sampling and block verification preserve the target's distribution only if they refuse
        sampled tokens themselves. So the first token that the grammar refuses stays in the Draft for them.
        The target gives it probability 0.

        Args:
            room: most nodes of the result.
            has_probs: whether the Draft has ``draft_probs``, as every rule but coupled verification needs.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        if self._mask_s * (len(draft) + MAX_FORCED) > MASKS_S:
            affordable = int(MASKS_S / self._mask_s)
            draft, room = draft.leading(affordable), min(room, affordable)
        following = {ROOT: self._drafted.compute_ff_tokens()}  # forced tokens after each kept node
        forced, refused = [], []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in following:
                continue
            if not self._may_end_with(_tokens_to(draft, node)):
                refused.append(node)
                continue
            expected = following[parent]
            if expected[:1] == [token]:
                forced.append(node)
                following[node] = expected[1:] or self._forced_after(token)
            else:
                following[node] = self._forced_after(token)
        kept = [node for node in range(len(draft)) if node in following or (has_probs and node in refused)]
        end = _end_of_chain(draft, kept)
        more = following.get(end, [])[: max(min(room - len(kept), MAX_FORCED), 0)]
        seen = _with_chain(draft.part(ROOT, kept), kept, end, more, has_probs)
        return Constrained(seen, tuple(kept), tuple(forced))

    def _forced_after(self, token: int) -> list[int]:
        """Returns the forced tokens after this token; empty if the token ends the generation."""
        return [] if token in self._ends else self._drafted.compute_ff_tokens()

    def _may_end_with(self, path: list[int]) -> bool:
        """Whether the last token of the path may follow the tokens before it."""
        if path[-1] not in self._ends:
            return self._go(path)
        return self._go(path[:-1]) and allows(self._mask(), path[-1])

    def _commit(self, generated: list[int]) -> None:
        """Moves both states to the end of these committed tokens."""
        if self._tokens != generated[: len(self._tokens)]:
            self._committed, self._tokens = self._compiled.deep_copy(), []
        has_moved = self._take(self._committed, self._tokens, generated)
        self._drafted, self._path = self._committed.deep_copy(), []
        if not has_moved:
            _check(self._committed)
            raise GrammarError(f"token {len(self._tokens)} of the answer contradicts its grammar")

    def _go(self, path: list[int]) -> bool:
        """Moves the drafted state along ``path`` after the committed tokens; False if it is refused.

        Each branch is followed on a copy. After ``rollback``, llguidance 1.9.1 can return the mask of the
        previous branch for the next branch.
        """
        if self._path != path[: len(self._path)]:
            self._drafted, self._path = self._committed.deep_copy(), []
        return self._take(self._drafted, self._path, path)

    def _take(self, matcher: LLMatcher, taken: list[int], tokens: list[int]) -> bool:
        """Feeds a matcher the tokens after ``taken``, which grows; False if the grammar refuses a token."""
        for token in tokens[len(taken) :]:
            if token in self._ends or token >= self._vocab_size:  # the library cannot consume such a token
                return False
            if matcher.try_consume_tokens([token]) != 1:
                return False
            taken.append(token)
        return True

    def _mask(self) -> Mask:
        mask = np.frombuffer(self._drafted.compute_bitmask(), np.int32)[: self._words]
        _check(self._drafted)
        return mask


def allows(mask: Mask, token: int) -> bool:
    """Whether the mask allows the token."""
    return bool(mask[token // 32] >> (token % 32) & 1)


def _tokens_to(draft: Draft, node: int) -> list[int]:
    """Returns the tokens on the path to a node, including its own token."""
    return [draft.tokens[above] for above in draft.path(node)]


def _end_of_chain(draft: Draft, kept: Sequence[int]) -> int:
    """Returns the last node of the chain of kept first children."""
    end = ROOT
    for node in kept:
        if draft.parents[node] == end:
            end = node
    return end


def _with_chain(draft: Draft, kept: Sequence[int], end: int, tokens: Sequence[int], has_probs: bool) -> Draft:
    """Returns the kept Draft plus these tokens, with probability 1, after the node that was ``end``."""
    if not tokens:
        return draft
    first = len(draft)
    parents = [kept.index(end) if end != ROOT else ROOT, *range(first, first + len(tokens) - 1)]
    sure = tuple(SparseProbs((token,), (1.0,)) for token in tokens) if has_probs else ()
    return Draft((*draft.tokens, *tokens), (*draft.parents, *parents), (*draft.draft_probs, *sure))


def _check(matcher: LLMatcher) -> None:
    """Raises GrammarError if the matcher is in its error state, which is final."""
    if matcher.is_error():  # the library's message may end with the state of its parser
        raise GrammarError(matcher.get_error().partition("\n<")[0].strip()[:MAX_REASON])
