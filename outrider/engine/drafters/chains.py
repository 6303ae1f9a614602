"""Chains that grow by a token at a time, chosen as the target would, or drawn for the ratio rules."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.decoding.draft import Draft, SparseProbs
from outrider.decoding.row import Row
from outrider.engine.asked import Asked
from outrider.engine.cache.paged_cache import PagedCache
from outrider.engine.sampler import choose_tokens
from outrider.engine.sequence import Sequence as Text


class Chains:
    """One for each Draft that is asked for. A chain ends at its depth, and at an end of the generation."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        self._tokens: list[list[int]] = [[] for _ in asked]
        self._probs: list[list[SparseProbs]] = [[] for _ in asked]
        self.growing = [index for index, one in enumerate(asked) if one.depth > 0]  # of those asked for
        self.unsound: list[int] = []  # that ended at numbers that are not finite

    @property
    def newest(self) -> list[int]:
        """[len(growing)] the last token of each that goes on."""
        return [self._tokens[index][-1] for index in self.growing]

    def grow(self, logits: Tensor, are_finite: Tensor | None = None) -> list[int]:
        """Another token for each of ``growing``, from logits [len(growing), vocab_size].

        are_finite: bool [len(growing)], of whatever else was computed for them.

        Returns those of their rows whose chain goes on, which ``growing`` now holds.
        """
        rows = [[self._row(index)] for index in self.growing]
        if are_finite is None:
            are_finite = logits.new_ones(len(logits)).bool()
        choices, finite = choose_tokens(logits, rows, are_finite)
        going_on = []
        for row, (index, choice) in enumerate(zip(self.growing, choices, strict=True)):
            if not (choice.are_sound[0] and finite[row]):
                self.unsound.append(index)
                continue
            asked, tokens = self._asked[index], self._tokens[index]
            if asked.text.sampling.verification == "coupled":
                tokens.append(choice.chosen[0])
            else:
                token, probs = choice.sample_draft_token(asked.round)
                tokens.append(token)
                self._probs[index].append(probs)
            if len(tokens) < asked.depth and tokens[-1] not in self._ends(index):
                going_on.append(row)
        self.growing = [self.growing[row] for row in going_on]
        return going_on

    def drafts(self) -> list[Draft]:
        """As they stand."""
        pairs = zip(self._tokens, self._probs, strict=True)
        return [Draft.chain(tokens, probs) for tokens, probs in pairs]

    def _row(self, index: int) -> Row:
        text, path = self._asked[index].text, self._tokens[index]
        assert isinstance(text, Text)
        generated, mask = text.tokens[text.prompt_length :], None
        if text.matcher is not None:
            (mask,) = text.matcher.masks(generated, Draft.chain(path), [len(path) - 1])
        return text.row(generated, tuple(path), mask)

    def _ends(self, index: int) -> frozenset[int]:
        text = self._asked[index].text
        assert isinstance(text, Text)
        return text.end_token_ids


def with_room(asked: Asked, cache: PagedCache, unwritten: int = 0) -> Asked:
    """As deep as there are blocks to write to: nobody gives up cache for a guess.

    unwritten: tokens of a chain that need no slot beyond those that the text has cached.
    """
    text = asked.text
    assert isinstance(text, Text)
    if cache.reserve(text, text.cached + asked.depth - unwritten):
        return asked
    return replace(asked, depth=len(text.blocks) * cache.block_size - text.cached + unwritten)
