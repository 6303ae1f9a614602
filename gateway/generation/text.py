"""Turns token ids into the text of an answer, token by token."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.generation.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # result of decoding bytes that are no complete character


class Detokenizer:
    """Incremental detokenizer: its joined pieces equal the text of all token ids decoded at once.

    ``before`` are the tokens before the text: they keep the space before its first word.
    """

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        # Decoding depends on the tokens before, so the tokens of the last piece are decoded again with new
        # tokens.
        self._context: list[int] = []
        self._context_text = ""  # certain part of the context's text
        text_before = vocabulary.decode(list(before))
        if before and before[-1] not in vocabulary.run_ids and not text_before.endswith(REPLACEMENT):
            self._context, self._context_text = list(before), text_before
        self._new: list[int] = []
        self._in_run = False  # whether the next token may change how the newest tokens are decoded
        self._length = 0  # number of characters that are certain
        self.start = 0  # offset of the newest token's own text, characters

    def add(self, token_id: int) -> str:
        """Returns the text that has become certain; "" while a character is incomplete."""
        self.start = self._length
        if self._in_run and token_id not in self._vocabulary.run_ids:
            self.start += len(self._decode()) - len(self._context_text)
        if token_id in self._vocabulary.special_ids:  # special tokens are removed before runs are formed
            return ""
        self._new.append(token_id)
        self._in_run = token_id in self._vocabulary.run_ids
        if self._in_run:
            return ""
        # The bytes of an incomplete character are decoded to a single replacement character.
        text = self._decode()
        incomplete = len(REPLACEMENT) if text.endswith(REPLACEMENT) else 0
        piece = text[len(self._context_text) : len(text) - incomplete]
        self._length += len(piece)
        if piece:
            # A character that is now incomplete began after the piece, so all its tokens are in the context.
            self._context, self._new = self._new, []
            context_text = self._vocabulary.decode(self._context)
            self._context_text = context_text[: len(context_text) - incomplete]
        return piece

    def end(self) -> str:
        """Returns the text that was held back, with an incomplete character as the replacement character."""
        piece = self._decode()[len(self._context_text) :]
        self._context, self._new = [*self._context, *self._new], []
        self._context_text += piece
        return piece

    def _decode(self) -> str:
        return self._vocabulary.decode([*self._context, *self._new])


class StopStrings:
    """Cuts text at the first stop string, even if it comes in several pieces."""

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        """keeps: whether the stop string belongs to the text."""
        self._stops = stops
        self._keeps = keeps
        self._held = ""  # end of the text that may be the beginning of a stop string
        self.found: str | None = None  # stop string that ends the answer

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """Returns text that is certain to belong to the answer. Sets ``found`` if the answer ends here.

        may_end: whether a stop string that this piece completes counts. If not, no later piece can complete
            it.
        """
        text = self._held + piece
        first = len(self._held) + 1  # first possible end of a stop string: it ends in the new piece
        found = [text.find(stop, max(first - len(stop), 0)) for stop in self._stops] if may_end else []
        starts = [(start, stop) for start, stop in zip(found, self._stops, strict=False) if start >= 0]
        if starts:
            start, self.found = min(starts)
            self._held = ""
            return text[: start + len(self.found)] if self._keeps else text[:start]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


class Piece(NamedTuple):
    """Text that a token adds to the answer."""

    text: str  # text that becomes certain with the token; may include text of earlier tokens
    start: int  # offset of the token's own text in the answer, characters


class AnswerText:
    """Turns committed tokens into the text of an answer, which does not depend on how tokens are grouped."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str],
        before: Sequence[int] = (),
        min_tokens: int = 0,
        *,
        keeps_stop: bool = False,
    ) -> None:
        """
        Args:
            before: tokens before the answer.
            min_tokens: number of first tokens whose text does not end at a stop string.
            keeps_stop: whether the stop string that ends the text belongs to it.
        """
        self._detokenizer = Detokenizer(vocabulary, before)
        self._stops = StopStrings(stops, keeps=keeps_stop)
        self._unstoppable = min_tokens  # tokens left of min_tokens

    @property
    def stop(self) -> str | None:
        """Stop string that ended the answer; None: no stop string was found."""
        return self._stops.found

    def add(self, token_ids: Sequence[int], *, ends: bool) -> list[Piece]:
        """Returns a piece for each token that belongs to the answer.

        ends: whether these tokens are the last.
        """
        pieces: list[Piece] = []
        for token_id in token_ids:
            text = self._stops.add(self._detokenizer.add(token_id), may_end=self._unstoppable <= 0)
            self._unstoppable -= 1
            pieces.append(Piece(text, self._detokenizer.start))
            if self.stop is not None:
                return pieces
        if ends and pieces:
            rest = self._stops.add(self._detokenizer.end(), may_end=self._unstoppable < 0) + self._stops.end()
            pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + rest)
        return pieces
