"""Survey: times steps of a loaded engine before the first request arrives.

A pace that knows no costs has to try Drafts even if they do not pay. An engine therefore times steps of a few
sizes before it serves. Gateways learn from these steps as they learn from the steps of requests.
"""

import logging
from collections.abc import Iterator

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.drafters.registry import row_of
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decode, Decoded, Failed, Propose, Result, Work, plain_decoding
from outrider.pace.step import Step

logger = logging.getLogger(__name__)

PROMPT = (1, 2, 3, 4, 5)  # token ids, which have no effect on the times
DRAFTED = Draft.chain([*PROMPT[:4]])  # not made by a drafter, whose acceptance rate it would change
PLAIN_TOKENS = 3  # tokens of plain decoding of each sequence; the first token needs the prefill
ROUNDS = 2  # rounds of each sequence with each drafter
MOST_SEQUENCES = 64  # sequences of the largest steps
LONGEST_S = 2.0  # seconds of steps after which no larger steps are timed

Survey = dict[str, tuple[Step, ...]]  # key: target drafter whose steps these are, or MODEL
MODEL = ""  # stands for the engine's own model


def survey(engine: Engine) -> Survey:
    """Returns timed steps of plain decoding and of rounds, or of drafting if the engine holds a draft.

    Its sequences are closed when it returns. The result is empty if the engine's longest sequence or its
    vocabulary is too small, or if a step fails.
    """
    try:
        return _Surveying(engine).survey()
    except _FailedError as failed:
        logger.error("the pace begins without costs, since a step failed: %s", failed)
        return {}


class _FailedError(Exception):
    """Error: a sequence could not continue."""


class _Surveying:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Without a drafter, rounds are timed as well: they cost the same except for drafting.
        self._drafters = [row_of(name).name for name in engine.settings.drafters] or [""]
        self._steps: dict[str, dict[int, Step]] = {}  # steps by number, by key of Survey
        self._most_tokens = PLAIN_TOKENS + ROUNDS * len(self._drafters) * (1 + len(DRAFTED)) + 1

    def survey(self) -> Survey:
        length = len(PROMPT) + self._most_tokens
        if length > self._engine.max_length or self._engine.vocab_size <= max(PROMPT):
            return {}
        self._time(1)
        self._steps.clear()  # the first steps of a process are slower
        blocks = -(-length // self._engine.settings.block_size)
        fitting = self._engine.load().free_blocks // blocks
        most = min(MOST_SEQUENCES, self._engine.settings.max_sequences, fitting)
        sequences = 1
        while sequences <= most and self._seconds < LONGEST_S:
            self._time(sequences)
            sequences *= 2
        return {name: tuple(steps.values()) for name, steps in self._steps.items()}

    @property
    def _seconds(self) -> float:
        return sum(step.seconds for steps in self._steps.values() for step in steps.values())

    def _time(self, count: int) -> None:
        """Times steps of ``count`` sequences. Raises _FailedError."""
        engine, sampling = self._engine, Sampling(max_tokens=self._most_tokens, ignore_eos=True)
        sequences = [engine.open(len(PROMPT), noise_key, sampling) for noise_key in range(count)]
        try:
            for turn in self._drafts(sequences) if engine.settings.is_draft else self._decoding(sequences):
                for work in turn:
                    engine.submit(work)
                while any(map(engine.works_on, sequences)):
                    for result in engine.step():
                        self._note(result)
        finally:
            for sequence in sequences:
                engine.close(sequence)

    def _note(self, result: Result) -> None:
        if isinstance(result, Failed):
            raise _FailedError(result.reason)
        steps = {MODEL: result.timings.last_step}
        if isinstance(result, Decoded) and result.draft_step is not None:
            steps[result.drafter] = result.draft_step
        for name, step in steps.items():
            self._steps.setdefault(name, {})[step.number] = step

    def _decoding(self, sequences: list[EngineSequence]) -> Iterator[list[Work]]:
        """Yields the work of plain decoding, then the work of each round with each drafter."""
        yield [plain_decoding(sequence.number, 0, PROMPT, PLAIN_TOKENS) for sequence in sequences]
        for turn in range(ROUNDS * len(self._drafters)):
            drafter = self._drafters[turn // ROUNDS]
            lease = Lease(depth=len(DRAFTED) if drafter else 0, drafter=drafter)
            yield [
                Decode(sequence.number, len(sequence.tokens), (), DRAFTED, 1 + turn, lease)
                for sequence in sequences
            ]

    @staticmethod
    def _drafts(sequences: list[EngineSequence]) -> Iterator[list[Work]]:
        """Yields the work that prefills the prompt, then the work of a Draft."""
        for turn, depth in enumerate((0, len(DRAFTED))):
            yield [Propose(sequence.number, 0, PROMPT, depth, turn) for sequence in sequences]
