"""Runs of an engine until it has nothing left to do."""

from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decoded, Result


def run(engine: Engine) -> list[Result]:
    """Takes steps while there is work. Returns all results, in their order."""
    results: list[Result] = []
    while engine.has_work:
        results += engine.step()
    return results


def texts(results: list[Result], sequences: list[EngineSequence]) -> list[list[int]]:
    """Returns what plain decoding said in each sequence."""
    return [
        [
            result.verdict.tokens[-1]
            for result in results
            if isinstance(result, Decoded) and result.sequence == sequence.number
        ]
        for sequence in sequences
    ]
