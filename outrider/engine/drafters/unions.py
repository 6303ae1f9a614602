"""Drafts of target drafters, pruned to the nodes that pay and merged with the guesses of indices."""

from collections.abc import Iterable, Sequence

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.drafters.registry import DrafterInfo, drafter, split_name
from outrider.drafters.union import PRIOR_RATES, PRIOR_RATES_OF_PREDICTIONS, DraftUnion, LearnedRates
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.sequence import EngineSequence

TAKEN_IN = 512  # tokens that a step adds to the indices: 1 to 2 ms, for which all sequences wait


class DraftUnions:
    """Unions and learned rates of the sequences whose Drafts have promises or are merged with indices."""

    def __init__(self) -> None:
        self._rates: dict[str, LearnedRates] = {}  # key: name of the mixed drafter
        # Keys: number of the sequence, then names of the indices.
        self._unions: dict[int, dict[tuple[str, ...], DraftUnion]] = {}

    def united(self, wanted: Iterable[tuple[Lease, DraftRequest, Draft, Sequence[float]]]) -> list[Draft]:
        """Returns the Drafts of a step, pruned to the nodes that pay and merged with guesses of indices.

        A Draft that has neither promises nor indices is unchanged. So is a Draft for rejection sampling or
        block verification: these judge tokens by the distributions from which the whole chain was drawn.
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
