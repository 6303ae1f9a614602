"""Drafts of target drafters, cut to the nodes that pay, and united with what indices guess."""

from collections.abc import Iterable, Sequence

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.drafters.registry import DrafterInfo, drafter, split_name
from outrider.drafters.union import PRIOR_RATES, PRIOR_RATES_OF_PREDICTIONS, DraftUnion, LearnedRates
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.sequence import EngineSequence

TAKEN_IN = 512  # tokens that enter the indices in a step, a millisecond or two, for which all sequences wait


class DraftUnions:
    """Holds what is learned of each sequence whose Drafts promise something, or are united with indices."""

    def __init__(self) -> None:
        self._rates: dict[str, LearnedRates] = {}  # rates by name of the mixed drafter
        # Unions by number of the sequence and names of the indices.
        self._unions: dict[int, dict[tuple[str, ...], DraftUnion]] = {}

    def united(self, wanted: Iterable[tuple[Lease, DraftRequest, Draft, Sequence[float]]]) -> list[Draft]:
        """Returns the Drafts of a step with the nodes that pay, and with the guesses of the indices.

        Without an index, a Draft that promises nothing stays as it is.

        Rejection sampling and block verification accept guesses by the distribution that a whole chain was
        drawn from. So a sequence under them keeps its Draft.
        """
        left, drafts = TAKEN_IN, list[Draft]()
        for lease, request, draft, promises in wanted:
            sequence, (_, names) = request.engine_sequence, split_name(lease.drafter)
            if sequence.sampling.verification != "coupled" or not (names or promises):
                drafts.append(draft)
                continue
            indices = [*map(drafter, names)]
            union, rates = self._of(sequence, indices), self._rates_of(lease.drafter, indices)
            left -= union.take_in(sequence.tokens, left)
            nodes, least = request.depth + request.alternatives, lease.least_survival
            ends = sequence.end_token_ids
            drafts.append(union.united(sequence.tokens, draft, rates, nodes, least, ends, promises))
        return drafts

    def _of(self, sequence: EngineSequence, indices: Sequence[DrafterInfo]) -> DraftUnion:
        unions, names = self._unions.setdefault(sequence.number, {}), tuple(row.name for row in indices)
        if names not in unions:
            past = sequence.texts.past if any(row.remembers for row in indices) else ()
            given = sequence.texts.prediction, len(past) + sequence.prompt_length
            made = [row.load()(*given if row.reads_prediction else ()) for row in indices]
            unions[names] = DraftUnion(made, past)
        return unions[names]

    def _rates_of(self, name: str, indices: Sequence[DrafterInfo]) -> LearnedRates:
        if name not in self._rates:
            priors = [PRIOR_RATES_OF_PREDICTIONS if row.reads_prediction else PRIOR_RATES for row in indices]
            self._rates[name] = LearnedRates(priors or [PRIOR_RATES])
        return self._rates[name]

    def forget(self, sequence: EngineSequence) -> None:
        """Forgets a closed sequence."""
        self._unions.pop(sequence.number, None)
