"""Server-sent events of an answer."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from gateway.api.message_json import as_json
from gateway.api.openai.answer_types import ChatEvent, CompletionEvent, Error, EventDetails
from gateway.api.openai.chat_answer import ChatAnswer
from gateway.api.openai.completions import CompletionAnswer
from gateway.api.openai.http_errors import error_answer, error_body
from gateway.api.openai.schemas import StreamOptions
from gateway.api.openai.usage import token_counts
from gateway.api.round_message import round_message
from gateway.errors import DEFECT, GatewayError
from gateway.generation.request import Chunk
from gateway.generation.vocabulary import TokenBytes

Event = CompletionEvent | ChatEvent

logger = logging.getLogger(f"ray.serve.{__name__}")

LONG_ANSWER = 1024  # tokens, or log-probabilities; writing them takes about a millisecond


async def events(
    first: Chunk,
    chunks: AsyncGenerator[Chunk, None],
    answer: CompletionAnswer | ChatAnswer,
    options: StreamOptions,
    tokens: TokenBytes,
    prompt_tokens: int,
) -> AsyncIterator[str]:
    """Yields server-sent events, the last of which is [DONE]. An error is sent as an event too."""
    chunk, written = first, 0

    def counted(body: Event) -> Event:
        """Adds usage to an event if the request asks for it.

        These are the counts so far with continuous_usage_stats, else null until the last event.
        """
        if options.include_usage:
            counts = token_counts(prompt_tokens, written) if options.continuous_usage_stats else None
            body["usage"] = counts
        return body

    async with aclosing(chunks):
        try:
            for opening in answer.opening():
                yield event(counted(opening))
            while True:
                bodies: Sequence[Event] = (
                    await asyncio.to_thread(answer.chunk, chunk) if is_long([chunk]) else answer.chunk(chunk)
                )
                written += len(chunk.tokens)
                if options.include_rounds:
                    bodies = bodies or [answer.wordless()]
                    bodies[0]["outrider"] = bodies[0].get("outrider", EventDetails()) | _details(
                        chunk, tokens
                    )
                for body in bodies:
                    yield event(counted(body))
                if chunk.usage is not None:
                    break
                chunk = await anext(chunks)
            if options.include_usage:
                yield event(answer.usage(chunk.usage))
        except GatewayError as error:
            yield event(error_answer(error))
        except Exception:
            logger.exception("a stream of events failed")
            yield event(error_body(DEFECT, type_="server_error"))
    yield "data: [DONE]\n\n"


def _details(chunk: Chunk, tokens: TokenBytes) -> EventDetails:
    """Returns the chunk's tokens with their origins, and its round with the text of the drafted tokens."""
    pairs = zip(chunk.tokens, chunk.pieces, strict=True)
    body: EventDetails = {
        "choice": chunk.choice,
        "tokens": [{"text": piece.text, "origin": token.origin.value} for token, piece in pairs],
    }
    if chunk.round is not None:
        message = round_message(chunk.round)
        body["round"] = {
            **as_json(message),
            "drafted": [tokens.text(token_id) for token_id in message.drafted],
        }
    return body


def is_long(chunks: list[Chunk]) -> bool:
    """Returns whether a thread should write the chunks as JSON, as that takes more than a millisecond."""
    scored = [token.logprobs for chunk in chunks for token in chunk.tokens]
    scored += [logprobs for chunk in chunks for logprobs in chunk.scores]
    return len(scored) + sum(len(logprobs.token_ids) for logprobs in scored if logprobs) > LONG_ANSWER


def event(body: Event | Error) -> str:
    return f"data: {json.dumps(body)}\n\n"
