"""A token that makes an engine fail when it is fed, and prompts with and without the token."""

from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import plain_decoding
from tests.support.engine_runs import run, texts

BLOCK = 8
COUNT = 8
POISON = 250  # token that makes an engine fail when it is fed
SAMPLING = Sampling(temperature=1.0, max_tokens=COUNT, bad_token_ids=(POISON,))
PROMPTS = [tuple(range(start, start + 20)) for start in (3, 40, 80, 120, 160)]
POISONED = (*range(200, 215), POISON, 216, 217)


def start(engine: Engine, prompt: tuple[int, ...], key: int = 1) -> EngineSequence:
    sequence = engine.open(len(prompt), key, SAMPLING)
    engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    return sequence


def text_alone(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    sequence = start(engine, prompt)
    results = run(engine)
    engine.close(sequence)
    return texts(results, [sequence])[0]
