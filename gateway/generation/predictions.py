"""Predictions of a request's answers: given by the request, or stored as a past answer."""

from collections.abc import Iterable, Sequence

from gateway.errors import InvalidRequestError
from gateway.generation.answer_store import AnswerStore, answers_of
from gateway.generation.limits import Limits
from gateway.generation.request import Request
from gateway.generation.tokenization import Tokenization
from gateway.sequence import GatewaySequence
from outrider.drafters.prediction import foreseen


async def predictions_of(
    request: Request,
    caller: str | None,
    answers: AnswerStore,
    limits: Limits,
    tokenization: Tokenization,
) -> Sequence[tuple[int, ...]]:
    """Returns the predicted token ids of each answer, in the order of the answers; empty: no prediction.

    A stored answer may be gone, or may have had fewer choices. That is no error: a missing prediction only
    means fewer Drafts.

    Raises:
        InvalidRequestError: the request is invalid; the error names the field.
        WorkerLostError: there is no target.
    """
    count, given = request.n * len(request.prompts), request.prediction
    if request.draft_from is not None:
        if given is not None:
            raise InvalidRequestError("draft_from", "is not accepted beside a prediction")
        entry = None if caller is None else await answers.get(caller, request.draft_from)
        stored = [] if entry is None else answers_of(entry)[:count]
        return [*stored, *[()] * (count - len(stored))]
    if given is None:
        return [()] * count
    if isinstance(given, str):
        limits.check_text("prediction", given)
        given = tuple((await tokenization.encode(given, add_special_tokens=False)).ids)
    limits.check_length("prediction", given)
    limits.check_ids("prediction", given)
    return [given] * count


def predicted_tokens(sequences: Iterable[GatewaySequence]) -> tuple[int, int]:
    """Returns the number of predicted tokens that the answers have, and the number that they lack."""
    accepted = predicted = 0
    for sequence in sequences:
        if sequence.prediction:
            accepted += min(foreseen(sequence.prediction, sequence.generated), len(sequence.prediction))
            predicted += len(sequence.prediction)
    return accepted, predicted - accepted
