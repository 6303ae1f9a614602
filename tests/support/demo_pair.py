"""Engines of the demo pair in this process, and texts of its target."""

from functools import cache

from tokenizers import Tokenizer

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO, prompts
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings

CACHE = 2**27
DRAFTERS = DEMO.parent / "drafters"  # further drafters for the demo target, by name


@cache
def engine(role: str) -> Engine:
    return Engine.from_settings(
        EngineSettings(model=str(DEMO / role), dtype="float32", threads=1, cache_memory=CACHE)
    )


def prompt_of(kind: str, index: int = 0) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    return tuple(tokenizer.encode(prompts(kind, index + 1)[index]).ids)


def text_of(prompt: tuple[int, ...], count: int, **settings) -> tuple[int, ...]:
    sampling = Sampling(max_tokens=count, ignore_eos=True, **settings)
    return generate(engine("target"), None, [OfflineRequest(prompt, sampling, noise_key(1, 0, prompt))], 0)[
        0
    ].tokens
