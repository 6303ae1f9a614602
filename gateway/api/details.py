"""A round as both APIs tell of it, where they are asked to."""

from gateway.api.message_json import as_json
from gateway.api.openai.answer_types import EventDetails
from gateway.events import VerdictFell
from gateway.generation.request import Chunk
from gateway.generation.token_bytes import TokenBytes
from protos import generation_pb2


def round_message(round_: VerdictFell) -> generation_pb2.Round:
    timings = round_.reply.timings
    return generation_pb2.Round(
        drafted=round_.proposal.draft.tokens,
        parents=round_.proposal.draft.parents,
        accepted=round_.correct,
        reason=round_.reason,
        ahead_hit=round_.proposal.ahead_hit,
        continued=round_.continued,
        draft_ms=1e3 * round_.draft_s,
        target_ms=1e3 * round_.target_s,
        queue_ms=timings.queue_ns / 1e6,
        step_ms=timings.step_ns / 1e6,
        drafter=round_.proposal.drafter,
        because=round_.proposal.because,
    )


def details_body(chunk: Chunk, tokens: TokenBytes) -> EventDetails:
    """The chunk's tokens with their origins, and its round with the drafted tokens spelled out."""
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
