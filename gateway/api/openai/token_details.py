"""Fields of answers about single tokens, with vLLM's names and formats."""

from collections.abc import Iterable, Sequence

from gateway.api.openai.answer_types import PromptLogprob
from gateway.api.openai.schemas import GenerationRequest, finite
from gateway.generation.request import Chunk
from gateway.generation.vocabulary import TokenBytes
from protos.generation_pb2 import TokenLogprobs


def stop_reason(body: GenerationRequest, chunk: Chunk) -> str | int | None:
    """Returns the stop string or the token of ``stop_token_ids`` that ended an answer; None: neither did."""
    if chunk.stop is not None or chunk.finish_reason != "stop" or not chunk.tokens:
        return chunk.stop
    last = chunk.tokens[-1].id
    return last if last in body.stop_token_ids else None


def shown_at_most(body: GenerationRequest, asked: int | None) -> int | None:
    """Returns how many likely tokens an answer shows per position; None: all that the target sends.

    asked: number for the answer; the target sends more tokens if the number for the prompt is larger.
    """
    return None if body.prompt_logprobs is None else asked


def token_name(body: GenerationRequest, tokens: TokenBytes, token_id: int) -> str:
    """Returns a token as log-probabilities name it: by its text, or only by its id."""
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else tokens.text(token_id)


def prompt_logprobs(
    tokens: TokenBytes, prompt: Sequence[int], scores: Iterable[TokenLogprobs], most: int
) -> list[dict[str, PromptLogprob] | None]:
    """Returns the log-probabilities of a prompt's tokens; the first token has none.

    Args:
        prompt: token ids.
        scores: log-probabilities, from the second token on.
        most: number of likely tokens per position, next to the prompt's own token.
    """
    told: list[dict[str, PromptLogprob] | None] = [None]
    for token_id, scored in zip(prompt[1:], scores, strict=True):
        ids, values = scored.token_ids[:most], scored.logprobs[:most]
        place = {
            str(other): _logprob(tokens, other, value, rank)
            for rank, (other, value) in enumerate(zip(ids, values, strict=True), start=1)
        }
        told.append({str(token_id): _logprob(tokens, token_id, scored.logprob, None)} | place)
    return told


def _logprob(tokens: TokenBytes, token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
    """Returns an entry. rank: place among the likely tokens; None: the token is not among them."""
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.text(token_id)}
