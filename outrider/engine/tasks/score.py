"""Scores of given tokens: their log-probabilities under the model."""

import math

from outrider.decoding.sampling import scores
from outrider.engine.blame import NotFiniteError
from outrider.engine.choosing.sampler import Choices
from outrider.engine.tasks.rating import RatingTask
from outrider.engine.work import Scored


class ScoreTask(RatingTask):
    """Reports log-probabilities of the committed tokens from a position on."""

    def rated(self, start: int, end: int, choices: Choices) -> Scored:
        sequence = self.sequence
        told = scores(choices.logits, sequence.tokens[start:end], sequence.sampling.logprobs or 0)
        if any(math.isnan(position.chosen) for position in told):
            raise NotFiniteError
        return Scored(sequence.number, start, told, self.timings())
