"""Heads draft only what a grammar allows, and the text is the same with their Drafts."""

from pathlib import Path

import pytest

from outrider.decoding.grammar import compiled
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from tests.support.demo_pair import engine
from tests.support.dflash import write_dflash
from tests.support.eagle3 import P_EAGLE, Form, write_eagle3
from tests.support.grammars import ENDS, GRAMMARS, ids, tokens
from tests.support.heads import write_medusa
from tests.support.mtp import write_demo
from tests.support.target_drafters import TOKENS, engine_with, rounds

PROMPT = tuple(ids("Somebody as JSON: "))
FEW = Form(tokens=300)  # tokens; the target has 2048, so the head lacks most that a grammar allows


def target_with(kind: str, folder: Path) -> Engine:
    if kind == "early_exit":
        return engine_with(kind, own={"layers": 4})
    if kind == "colocated":
        return engine_with(kind, DEMO / "draft")
    if kind == "mtp":
        return engine_with(kind, model=str(write_demo(folder)))
    if kind == "medusa":
        return engine_with(kind, write_medusa(folder))
    if kind == "dflash":
        return engine_with(kind, write_dflash(folder))
    if kind == "peagle":
        return engine_with(kind, write_eagle3(folder, P_EAGLE))
    return engine_with("eagle3", write_eagle3(folder, FEW if kind == "eagle3 of few tokens" else Form()))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "kind",
    ["medusa", "eagle3", "eagle3 of few tokens", "peagle", "dflash", "mtp", "early_exit", "colocated"],
)
@pytest.mark.parametrize("name", ["person", pytest.param("recursive", marks=pytest.mark.slow), "thinking"])
def test_draft_of_a_head_follows_the_grammar(tmp_path: Path, kind: str, name: str) -> None:
    grammar = GRAMMARS[name]
    sampling = Sampling(max_tokens=TOKENS, temperature=0.8, grammar=grammar)
    asked = OfflineRequest(PROMPT, sampling, noise_key(1, 0, PROMPT))
    (plain,) = generate(engine("target"), None, [asked], 0)
    target = target_with(kind, tmp_path)
    (found,) = rounds(target, [PROMPT], 0.8, 4, grammar=grammar, ignore_eos=False)
    assert found.tokens == plain.tokens
    assert any(found.drafts)
    for length, draft in zip(found.lengths, found.drafts, strict=True):
        follows, before = compiled(grammar, tokens()), plain.tokens[: length - len(PROMPT)]
        assert follows.try_consume_tokens([*before]) == len(before)
        content = [token for token in draft.tokens if token not in ENDS]
        assert follows.try_consume_tokens(content) == len(content)
        assert follows.is_accepting() or len(content) == len(draft)
