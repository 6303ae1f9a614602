"""Runs of an engine until it has no work left."""

from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decoded, Result


def run(engine: Engine) -> list[Result]:
    """Runs steps while there is work, and returns all results in order."""
    results: list[Result] = []
    while engine.has_work:
        results += engine.step()
    return results


def texts(results: list[Result], sequences: list[EngineSequence]) -> list[list[int]]:
    """Returns the tokens of each sequence from results of plain decoding."""
    return [
        [
            result.verdict.tokens[-1]
            for result in results
            if isinstance(result, Decoded) and result.sequence == sequence.number
        ]
        for sequence in sequences
    ]
