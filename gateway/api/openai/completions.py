"""Bodies of /v1/completions."""

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import PlainValidator

from gateway.api.openai.schemas import GenerationRequest, are_ids, checked_text, finite, usage_bodies
from gateway.errors import InvalidRequestError
from gateway.generation.request import Chunk, Prepared, Request, Usage
from gateway.generation.text import Piece
from gateway.generation.token_bytes import TokenBytes
from gateway.generation.tokenization import Tokenization
from gateway.sequence import Token


def _prompt(value: Any) -> str | tuple[int, ...]:
    """OpenAI allows a list of prompts; one is accepted in it."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]
    if isinstance(value, str):
        return checked_text(value)
    if not isinstance(value, list) or not are_ids(value):
        raise ValueError("text or a list of token ids is accepted")
    return tuple(value)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str | tuple[int, ...], PlainValidator(_prompt, json_schema_input_type=str | list[int])]
    echo: bool = False

    def prepared(self) -> Request:
        """Raises InvalidRequestError for what the fields say together."""
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo", "cannot be combined with logprobs: a prompt's are not computed")
        return self.request(self.prompt)

    async def echoed(self, tokenization: Tokenization) -> str:
        """Text that comes before every choice."""
        if not self.echo:
            return ""
        return self.prompt if isinstance(self.prompt, str) else await tokenization.decode(self.prompt)


class CompletionAnswer:
    """The bodies of one answer; ``id``, time and model are the same in all of them."""

    def __init__(self, model: str, prepared: Prepared, tokens: TokenBytes, seed: int, echo: str) -> None:
        """
        Args:
            seed: as the caller is told of it.
            echo: text that comes before every choice.
        """
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._seed = seed
        self._told_seed = False
        self._tokens = tokens
        self._unsaid = dict.fromkeys(range(len(prepared.sequences)), echo)
        self._begin = len(echo)  # of the answer itself

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the first chunk."""
        return []

    def chunk(self, chunk: Chunk) -> dict[str, Any] | None:
        """One event of a stream; None where there is nothing to say yet.

        The first tells the seed, with which a stream that broke can be asked for again.
        """
        logprobs = self._logprobs(chunk.tokens, chunk.pieces)
        text = self._unsaid.pop(chunk.choice, "") + chunk.text
        if not text and logprobs is None and chunk.finish_reason is None:
            return None
        body = {**self._frame, "choices": [_choice(chunk.choice, text, logprobs, chunk.finish_reason)]}
        if not self._told_seed:
            self._told_seed = True
            body["outrider"] = {"seed": self._seed}
        return body

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The extra last event of a stream that asked for it: no choice, only usage."""
        return {**self._frame, "choices": [], **usage_bodies(usage, self._seed)}

    def whole(self, chunks: Iterable[Chunk], count: int) -> dict[str, Any]:
        """The body of an answer that is not streamed; ``count`` choices."""
        chunks = list(chunks)
        choices = []
        for index in range(count):
            own = [chunk for chunk in chunks if chunk.choice == index]
            text = self._unsaid[index] + "".join(chunk.text for chunk in own)
            tokens = [token for chunk in own for token in chunk.tokens]
            pieces = [piece for chunk in own for piece in chunk.pieces]
            choices.append(_choice(index, text, self._logprobs(tokens, pieces), own[-1].finish_reason))
        usage = chunks[-1].usage
        assert usage is not None
        return {**self._frame, "choices": choices, **usage_bodies(usage, self._seed)}

    def _logprobs(self, tokens: Iterable[Token], pieces: Iterable[Piece]) -> dict[str, Any] | None:
        names: list[str] = []
        chosen: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for token, piece in zip(tokens, pieces, strict=True):
            if token.logprobs is None:
                return None
            name = self._tokens.text(token.id)
            names.append(name)
            chosen.append(finite(token.logprobs.logprob))
            pairs = zip(token.logprobs.token_ids, token.logprobs.logprobs, strict=True)
            likeliest = {self._tokens.text(other): finite(logprob) for other, logprob in pairs}
            top.append({**likeliest, name: chosen[-1]})
            offsets.append(self._begin + piece.start)
        return {"tokens": names, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
