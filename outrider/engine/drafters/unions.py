"""Unions of the Drafts of target drafters with what is found in the text of each sequence."""

from collections import defaultdict

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.drafters.union import DraftUnion, LearnedRates
from outrider.engine.choosing.draft_request import DraftRequest
from outrider.engine.sequence import EngineSequence


class DraftUnions:
    """Holds the union of each sequence whose lease names an index beside its drafter."""

    def __init__(self) -> None:
        self._rates = defaultdict[str, LearnedRates](LearnedRates)  # rates by name of the mixed drafter
        self._unions: dict[int, DraftUnion] = {}  # unions by number of the sequence

    def united(self, lease: Lease, request: DraftRequest, draft: Draft) -> Draft:
        """Returns a Draft with the guesses of the index.

        Rejection sampling and block verification accept guesses by the distribution that a whole chain was
        drawn from. So a sequence under them keeps the Draft.
        """
        sequence = request.engine_sequence
        if sequence.sampling.verification != "coupled":
            return draft
        union = self._unions.get(sequence.number)
        if union is None:
            union = self._unions[sequence.number] = DraftUnion(self._rates[lease.drafter])
        nodes = request.depth + request.alternatives
        return union.united(sequence.tokens, draft, nodes, lease.least_survival, sequence.end_token_ids)

    def forget(self, sequence: EngineSequence) -> None:
        """Forgets a closed sequence."""
        self._unions.pop(sequence.number, None)
