"""Drafts of target drafters, cut to the nodes that pay, and united with what an index guesses."""

from collections.abc import Iterable, Sequence

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.drafters.registry import DrafterInfo, drafter, split_name
from outrider.drafters.union import PRIOR_RATES, PRIOR_RATES_OF_PREDICTIONS, DraftUnion, LearnedRates
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.sequence import EngineSequence

TAKEN_IN = 512  # tokens that enter the indices in a step, a millisecond or two, for which all sequences wait


class DraftUnions:
    """Holds what is learned of each sequence whose Drafts promise something, or are united with an index."""

    def __init__(self) -> None:
        self._rates: dict[str, LearnedRates] = {}  # rates by name of the mixed drafter
        # Unions by number of the sequence and name of the index.
        self._unions: dict[int, dict[str, DraftUnion]] = {}

    def united(self, wanted: Iterable[tuple[Lease, DraftRequest, Draft, Sequence[float]]]) -> list[Draft]:
        """Returns the Drafts of a step with the nodes that pay, and with the guesses of the index.

        Without an index, a Draft that promises nothing stays as it is.

        Rejection sampling and block verification accept guesses by the distribution that a whole chain was
        drawn from. So a sequence under them keeps its Draft.
        """
        left, drafts = TAKEN_IN, list[Draft]()
        for lease, request, draft, promises in wanted:
            sequence, name = request.engine_sequence, split_name(lease.drafter)[1]
            if sequence.sampling.verification != "coupled" or not (name or promises):
                drafts.append(draft)
                continue
            index = drafter(name) if name else None
            union, rates = self._of(sequence, index), self._rates_of(lease.drafter, index)
            left -= union.take_in(sequence.tokens, left)
            nodes, least = request.depth + request.alternatives, lease.least_survival
            ends = sequence.end_token_ids
            drafts.append(union.united(sequence.tokens, draft, rates, nodes, least, ends, promises))
        return drafts

    def _of(self, sequence: EngineSequence, index: DrafterInfo | None) -> DraftUnion:
        unions, name = self._unions.setdefault(sequence.number, {}), index.name if index else ""
        if name not in unions:
            unions[name] = DraftUnion()
            if index is not None:
                given = (sequence.prediction, sequence.prompt_length) if index.reads_prediction else ()
                unions[name] = DraftUnion(index.load()(*given))
        return unions[name]

    def _rates_of(self, name: str, index: DrafterInfo | None) -> LearnedRates:
        if name not in self._rates:
            of_prediction = index is not None and index.reads_prediction
            priors = PRIOR_RATES_OF_PREDICTIONS if of_prediction else PRIOR_RATES
            self._rates[name] = LearnedRates(priors)
        return self._rates[name]

    def forget(self, sequence: EngineSequence) -> None:
        """Forgets a closed sequence."""
        self._unions.pop(sequence.number, None)
