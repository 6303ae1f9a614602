"""Token ids to the text of an answer, a token at a time."""

from collections.abc import Sequence
from typing import NamedTuple

from gateway.generation.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are no character yet


class Detokenizer:
    """Token ids to text as they come. Joined, the pieces are what decoding all ids at once gives.

    ``before`` are the tokens before the text: the space between them and a first word is kept.
    """

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        # Decoding depends on what comes before: the last piece is decoded again with what is new.
        self._context: list[int] = []
        self._context_text = ""  # its text that was certain
        text_before = vocabulary.decode(list(before))
        if before and before[-1] not in vocabulary.run_ids and not text_before.endswith(REPLACEMENT):
            self._context, self._context_text = list(before), text_before
        self._new: list[int] = []
        self._in_run = False  # whether the next token may change how the newest tokens are decoded
        self._length = 0  # characters that are certain
        self.start = 0  # offset of the newest token's own text, characters

    def add(self, token_id: int) -> str:
        """Returns the text that is certain now; "" while a character is incomplete."""
        self.start = self._length
        if self._in_run and token_id not in self._vocabulary.run_ids:
            self.start += len(self._decode()) - len(self._context_text)
        if token_id in self._vocabulary.special_ids:  # they are left out before runs are formed
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
            # A character that is incomplete now began after the piece, thus within what is kept.
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
        """keeps: the stop string belongs to the text."""
        self._stops = stops
        self._keeps = keeps
        self._held = ""  # end of the text that may begin a stop string
        self.found: str | None = None  # stop string that ends the answer

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """Returns text that is certain to belong to the answer. Sets ``found`` when the answer ends here.

        may_end: whether a stop string that this piece completes counts. A later piece cannot complete it.
        """
        text = self._held + piece
        first = len(self._held) + 1  # a stop string ends in the new text
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
        """Returns the text that was held back, once nothing more can follow."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


class Piece(NamedTuple):
    """What a token adds to the answer."""

    text: str  # text that is certain with the token; may include text of earlier tokens
    start: int  # offset of its own text in the answer, characters


class AnswerText:
    """Committed tokens in, the text of the answer out. It does not depend on how tokens are grouped."""

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
            min_tokens: tokens whose text no stop string may end.
            keeps_stop: the stop string that ends the text belongs to it.
        """
        self._detokenizer = Detokenizer(vocabulary, before)
        self._stops = StopStrings(stops, keeps=keeps_stop)
        self._unstoppable = min_tokens  # tokens left of them

    @property
    def stop(self) -> str | None:
        """Stop string that was found and ends the answer; None: none was."""
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
