"""A seed gives the same text from a narrow cache: plain, with Drafts, preempted, and over two ranks.

Prompts share their beginnings, and the cache is too small for all sequences at a time.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.functions import needs_functions
from tests.support.ranks import Ranks, follow_to_the_end

TOKENS, REQUESTS = 24, 16
Texts = list[tuple[int, ...]]


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    given = {"block_size": 4, "cache_memory": 2**17, "prefill_chunk": 48, "dtype": "float32", "threads": 1}
    given |= {"cache_dtype": "float8_e4m3fn"}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def requests() -> list[OfflineRequest]:
    rng = random.Random(4)
    stems = [tuple(rng.choices(range(3, VOCAB_SIZE), k=length)) for length in (9, 30, 61)]
    made = []
    for number in range(REQUESTS):
        prompt = (*stems[number % 3], *rng.choices(range(3, VOCAB_SIZE), k=rng.randrange(1, 20)))
        sampling = Sampling(max_tokens=TOKENS, temperature=0.8 * (number % 2))
        made.append(OfflineRequest(prompt, sampling, number))
    return made


def texts(
    group: RankGroup | None, settings: EngineSettings, draft: EngineSettings
) -> tuple[Texts, dict[str, Texts]]:
    """Texts of plain decoding alone, and of every mode together."""
    target, asked = Engine.from_settings(settings, group), requests()
    assert target._cache.capacity < sum(len(request.prompt) + TOKENS for request in asked)
    model = DraftModel(Engine.from_settings(draft))
    modes: dict[str, tuple[Drafter | None, int, int]] = {
        "plain": (None, 0, 0),
        "chains": (model, 5, 0),
        "trees": (model, 3, 6),
        "n-grams": (IndexDrafter(NgramIndex), 4, 0),
    }
    alone = [generate(target, None, [request], 0)[0].tokens for request in asked]
    together = {
        name: [output.tokens for output in generate(target, drafter, asked, *sizes)]
        for name, (drafter, *sizes) in modes.items()
    }
    target.shut_down()
    return alone, together


def check(found: tuple[Texts, dict[str, Texts]]) -> None:
    alone, together = found
    assert len(set(alone)) > REQUESTS // 2
    for mode, answers in together.items():
        assert answers == alone, mode


@pytest.mark.slow_beyond_first
@needs_functions
@pytest.mark.parametrize("kind", ["llama", "mistral"])  # mistral has a window shorter than the texts
def test_narrow_cache_in_every_mode_gives_the_same_text(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path, kind)
    settings = settings_of(folder)
    found = texts(None, settings, settings_of(folder, cache_dtype="auto"))
    check(found)
    wide = Engine.from_settings(settings_of(folder, cache_dtype="auto", cache_memory=2**20))
    assert found[0] != [generate(wide, None, [request], 0)[0].tokens for request in requests()]


@pytest.mark.slow
@needs_functions
def test_narrow_cache_over_two_ranks_gives_the_same_text_in_every_mode(ranks: Ranks, tmp_path: Path) -> None:
    alone = settings_of(write_checkpoint(tmp_path, "llama"), cache_memory=2**16)
    shared = alone.model_copy(update={"tensor_parallel": 2})
    found, _ = ranks.run(texts, follow_to_the_end, shared, settings_of(Path(alone.model), cache_dtype="auto"))
    check(found)
