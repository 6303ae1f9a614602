"""Grammars: which tokens an answer of a given form may go on with, position by position. Torch-free.

A grammar is a text that llguidance takes: a JSON schema, a regular expression or a grammar in Lark, wrapped
by its own functions. What decides is the text alone, so the target, a draft and a restarted worker agree.
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

from outrider.decoding.draft import ROOT, Draft, SparseProbs, agreed

Mask = NDArray[np.int32]  # [ceil(vocab_size / 32)], a set bit for each token that may come, lowest bits first

MAX_GRAMMAR = 2**17  # characters
MAX_FORCED = 16  # forced tokens that are verified at a time, beyond what was drafted
MASKS_S = 0.01  # processor time for the masks of one Draft: it is cut where they would take longer
TRIAL = 4  # tokens for which a grammar is tried out
MAX_REASON = 300  # characters of why a grammar is refused: it may quote all of it
# A grammar that needs more is refused, or fails its own sequence. They bound a step's work: 100,000 of lexer
# fuel take about 7 ms, 20,000 items 1 ms, and 20,000 states about 40 MB.
LIMITS: Final = LLParserLimits(
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar cannot be compiled, or asks for too much."""


def token_table(tokenizer: str, vocab_size: int, end_token_ids: Iterable[int] = ()) -> LLTokenizer:
    """What grammars have to know of a vocabulary. It takes two seconds for 131k tokens, and the interpreter.

    Args:
        tokenizer: tokenizer.json.
        vocab_size: of the model, whose embeddings may be padded.
        end_token_ids: of the model; none: what the tokenizer has.
    """
    ends = sorted(end_token_ids)
    known = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends or None, slices=[])
    return LLTokenizer(TokenizerWrapper(_Spelling(known)), n_vocab=vocab_size, eos_token=known.eos_tokens)


class _Spelling:
    """A vocabulary as the library reads it, in which no text becomes a mark.

    Marks are added tokens like <tool_call>. To the library they are no text, but forced text that looks like
    one becomes one in its own tokenizer: the only token that may come would be one that it then refuses.
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
        """Its tokens. A mark's text is cut behind its first character, and the parts are no marks."""
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
    """At the beginning of an answer. Other threads run meanwhile; it is bounded by LIMITS.

    Raises:
        GrammarError: it cannot be; the message says why.
    """
    if len(grammar) > MAX_GRAMMAR:
        raise GrammarError(f"{len(grammar)} characters, at most {MAX_GRAMMAR} are accepted")
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
    _check(matcher)
    trial = matcher.deep_copy()
    for _ in range(TRIAL):  # some ask for too much only on the way
        mask = np.frombuffer(trial.compute_bitmask(), np.uint8)
        lowest = int(np.unpackbits(mask, bitorder="little").argmax())
        has_gone_on = not trial.is_error() and trial.try_consume_tokens([lowest])
        _check(trial)
        if not has_gone_on:
            break
    return matcher


@dataclass(frozen=True)
class Constrained:
    """A Draft under a grammar: without what that refuses, and with what it forces after the chain."""

    draft: Draft
    kept: tuple[int, ...]  # of its leading nodes, which they were in the Draft that was given
    forced: tuple[int, ...]  # of the given Draft's nodes, those that the grammar forces


class Matcher:
    """Follows one answer. It is told what is committed, and looks from there along what is drafted."""

    def __init__(self, compiled: LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """
        Args:
            compiled: at the beginning of an answer; it is not changed.
            end_token_ids: that end the generation: nothing of the grammar follows them.
        """
        self._matcher = compiled.deep_copy()
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._ends = end_token_ids
        self._mask_s = 0.0  # processor time of one of the latest masks
        self._path: list[int] = []  # tokens that it stands after, committed and drafted ones

    def masks(self, generated: list[int], draft: Draft, nodes: Iterable[int]) -> list[Mask | None]:
        """What may come after each of the Draft's nodes, or ROOT; None where no answer comes along.

        generated: committed tokens, without the prompt.

        Raises:
            GrammarError: the committed tokens contradict the grammar, or it asks for too much.
        """
        begun = time.thread_time()
        self._commit(generated)
        masks = [
            self._mask() if self._go(len(generated), _tokens_to(draft, node)) else None for node in nodes
        ]
        self._mask_s = (time.thread_time() - begun) / max(len(masks), 1)
        return masks

    def may_end(self, generated: list[int], token: int) -> bool:
        """Whether the token that ends the generation may follow these tokens.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        return allows(self._mask(), token)

    def forced(self, generated: list[int], drafted: list[int]) -> list[int]:
        """The tokens that must follow these, as far as they are the only ones.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        if not self._go(len(generated), drafted):
            return []
        return list(self._matcher.compute_ff_tokens())

    def constrained(
        self, generated: list[int], draft: Draft, room: int, has_probs: bool = False
    ) -> Constrained:
        """The Draft as far as the grammar lets it come, and the tokens that must follow its chain.

        Rejection sampling and block verification keep the target's distribution only if they refuse drawn
        tokens themselves. So they get the first token that the grammar refuses, with probability 0.

        Args:
            room: nodes that it may have.
            has_probs: whether it carries ``draft_probs``: every rule but coupled verification needs them.

        Raises:
            GrammarError: as ``masks``.
        """
        self._commit(generated)
        if self._mask_s * (len(draft) + MAX_FORCED) > MASKS_S:
            affordable = int(MASKS_S / self._mask_s)
            draft, room = draft.leading(affordable), min(room, affordable)
        following = {ROOT: self._matcher.compute_ff_tokens()}  # tokens that must follow each node kept
        forced, refused = [], []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in following:
                continue
            if not self._may_end_with(len(generated), _tokens_to(draft, node)):
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
        """Where it stands after the token, unless that ends the generation."""
        return [] if token in self._ends else self._matcher.compute_ff_tokens()

    def _may_end_with(self, base: int, path: list[int]) -> bool:
        """Whether its last token may follow the others."""
        if path[-1] not in self._ends:
            return self._go(base, path)
        return self._go(base, path[:-1]) and allows(self._mask(), path[-1])

    def _commit(self, generated: list[int]) -> None:
        """Stands after these tokens."""
        same = len(self._path)
        if self._path != generated[:same]:
            same = agreed(self._path, generated)
        if not self._go(0, generated, same):
            _check(self._matcher)
            raise GrammarError(f"token {len(self._path)} of the answer contradicts its grammar")

    def _go(self, base: int, path: list[int], same: int | None = None) -> bool:
        """Stands after ``path``, which follows the first ``base`` tokens; False if the grammar refuses it.

        same: of the path's tokens, how many it stands after already.
        """
        same = agreed(self._path[base:], path) if same is None else same
        back = len(self._path) - base - same
        if back:
            self._matcher.rollback(back)
            del self._path[base + same :]
        for token in path[same:]:
            if token in self._ends or token >= self._vocab_size:  # the library cannot go on after these
                return False
            if self._matcher.try_consume_tokens([token]) != 1:
                return False
            self._path.append(token)
        return True

    def _mask(self) -> Mask:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        _check(self._matcher)
        return mask


def allows(mask: Mask, token: int) -> bool:
    """Whether the token may come."""
    return bool(mask[token // 32] >> (token % 32) & 1)


def _tokens_to(draft: Draft, node: int) -> list[int]:
    """Those on the way to it, its own included."""
    return [draft.tokens[above] for above in draft.path(node)]


def _end_of_chain(draft: Draft, kept: Sequence[int]) -> int:
    """Where one comes to by the first child of every node that is kept."""
    end = ROOT
    for node in kept:
        if draft.parents[node] == end:
            end = node
    return end


def _with_chain(draft: Draft, kept: Sequence[int], end: int, tokens: Sequence[int], has_probs: bool) -> Draft:
    """The kept part of a Draft, and after what was its node ``end`` these tokens, which are certain."""
    if not tokens:
        return draft
    first = len(draft)
    parents = [kept.index(end) if end != ROOT else ROOT, *range(first, first + len(tokens) - 1)]
    sure = tuple(SparseProbs((token,), (1.0,)) for token in tokens) if has_probs else ()
    return Draft((*draft.tokens, *tokens), (*draft.parents, *parents), (*draft.draft_probs, *sure))


def _check(matcher: LLMatcher) -> None:
    """Raises GrammarError where it is in a state that it cannot leave."""
    if matcher.is_error():  # what the library says may end with the state of its parser
        raise GrammarError(matcher.get_error().partition("\n<")[0].strip()[:MAX_REASON])
