"""Self-speculation: the same text, Drafts against plain arithmetic, the target's cache, what is refused."""

import logging
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import Draft
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.lease import Lease
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.drafters import early_exit, exit_search
from outrider.engine.drafters.early_exit import EarlyExit
from outrider.engine.errors import CacheLostError, UnsupportedModelError
from outrider.engine.inputs.step_input import Changes, Feed
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings, TargetDrafterSettings
from outrider.engine.work import Decode, Decoded
from tests.support.capture import SIZES, capturing
from tests.support.checkpoints import write_checkpoint
from tests.support.demo_pair import prompt_of
from tests.support.eagle3 import target_model
from tests.support.heads import refusal_of
from tests.support.target_drafters import (
    KINDS,
    TOKENS,
    Drafted,
    check_no_gap,
    drafted_texts,
    drafter_of,
    drafters_with,
    engine_with,
    plain_texts,
    rounds,
)

LEAVES_AFTER = 4  # layers; the target has six


@pytest.fixture(scope="module")
def target() -> Engine:
    return engine_with("early_exit", own={"layers": LEAVES_AFTER})


@cache
def first_layers() -> Any:
    """First layers of the demo target, loaded as a model of their own."""
    model = target_model().__class__.from_pretrained(DEMO / "target", num_hidden_layers=LEAVES_AFTER)
    return model.float().eval()


@torch.inference_mode()
def check_draft(draft: Draft, before: list[int], length: int) -> None:
    """Each of its tokens is what the first layers say after all before it. length: of the text's prompt."""
    text, sampling = [*before, *draft.tokens], Sampling(temperature=0.7)
    key = noise_key(1, 0, tuple(before[:length]))
    logits = first_layers()(input_ids=torch.tensor([text])).logits[0, len(before) - 1 : -1]
    rows = [
        ChoiceContext(sampling, key, place, text[:length], text[length:place])
        for place in range(len(before), len(text))
    ]
    if rows:
        assert gumbel_max(logits / 0.7, rows, 1)[0].flatten().tolist() == [*draft.tokens]


def check_drafts(found: list[Drafted], every: int = 1) -> None:
    """Each is what the first layers say after the tokens that were committed then."""
    for kind, text in zip(KINDS, found, strict=True):
        prompt = prompt_of(kind)
        for length, draft in [*zip(text.lengths, text.drafts, strict=True)][::every]:
            check_draft(draft, [*prompt, *text.tokens][:length], len(prompt))


def test_drafts_are_those_of_plain_arithmetic_after_partly_refused_chains_too(target: Engine) -> None:
    found = drafted_texts(target, 0.7, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(0.7)
    check_drafts(found)
    for kind, text in zip(KINDS, found, strict=True):
        end = len(prompt_of(kind)) + TOKENS
        assert [len(draft) for draft in text.drafts] == [min(4, end - length - 1) for length in text.lengths]
    assert any(0 < text.accepted < 4 * text.rounds for text in found)


@pytest.mark.parametrize(
    ("part", "temperature"),
    [({"layers": 2}, 0.0), ({"layers": 2}, 1.0), ({"skipped_layers": (2, 4)}, 0.7)],
    ids=str,
)
def test_text_is_the_same_with_drafts_and_without(part: dict[str, Any], temperature: float) -> None:
    found = drafted_texts(engine_with("early_exit", own=part), temperature, depth=4, company=6)
    assert [text.tokens for text in found] == plain_texts(temperature)
    assert sum(text.accepted for text in found) > 0


def test_all_layers_but_one_are_right_more_often_than_the_first_two() -> None:
    parts = ({"skipped_layers": (3,)}, {"layers": 2})
    most, least = (
        sum(text.accepted for text in drafted_texts(engine_with("early_exit", own=part), 0.7, 4, 6))
        for part in parts
    )
    assert most > 1.2 * least


@pytest.mark.slow
def test_chunked_prompts_shared_prefixes_and_lost_caches_change_no_draft() -> None:
    target = engine_with("early_exit", own={"layers": LEAVES_AFTER}, prefill_chunk=24, block_size=4)
    drafted_texts(target, 0.7, depth=4, company=6)
    check_drafts(drafted_texts(target, 0.7, depth=4, company=6), every=3)  # most of each prompt was there
    block = 4 * 6 * 2 * 4 * 32 * 4
    tight = engine_with("early_exit", own={"layers": LEAVES_AFTER}, block_size=4, cache_memory=60 * block)
    preempted = drafted_texts(tight, 0.7, depth=4, company=6)
    assert [text.tokens for text in preempted] == plain_texts(0.7)
    assert sum(text.preemptions for text in preempted) > 0
    assert {len(draft) for text in preempted for draft in text.drafts} > {4}  # some for want of blocks
    check_drafts(preempted, every=3)


def test_plain_decoding_between_rounds_changes_no_draft(target: Engine) -> None:
    check_no_gap(target)


def begin_with_a_branch(target: Engine, prompt: tuple[int, ...], text: tuple[int, ...]) -> EngineSequence:
    """A Verdict on a Draft whose chain is wrong and a branch of which stands: its cache has to move."""
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
    sequence = target.open(len(prompt), noise_key(1, 0, prompt), sampling)
    wrong = [token + 1 for token in text]
    tree = Draft(
        (wrong[0], text[0], wrong[1], text[1], wrong[2], text[2]),
        (-1, -1, 1, 1, 3, 3),
    )
    target.submit(Decode(sequence.number, 0, prompt, tree, 1, Lease(depth=4, drafter="early_exit")))
    return sequence


def test_after_a_branch_that_stood_its_cache_is_in_its_place(target: Engine) -> None:
    """The Verdict leaves the cache of the branch to be moved, and the part reads it before the next step."""
    prompt, text = prompt_of("code"), plain_texts(0.7)[KINDS.index("code")]
    sequence = begin_with_a_branch(target, prompt, text)
    (result,) = target.step()
    assert isinstance(result, Decoded)
    assert result.verdict.tokens == text[:4]
    assert result.draft is not None
    assert len(result.draft) == 4
    check_draft(result.draft, [*prompt, *text[:4]], len(prompt))
    target.submit(Decode(sequence.number, len(prompt) + 4, (), result.draft, 2))
    (result,) = target.step()
    assert isinstance(result, Decoded)
    assert result.verdict.tokens == text[4 : 4 + len(result.verdict.tokens)]
    target.close(sequence)


def test_cache_that_cannot_be_moved_for_a_draft_is_lost_to_the_target_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = engine_with("early_exit", own={"layers": LEAVES_AFTER})
    make = target._cache.make

    def failing(changes: Changes) -> None:
        if changes.moves:
            raise ZeroDivisionError
        make(changes)

    monkeypatch.setattr(target._cache, "make", failing)
    begin_with_a_branch(target, prompt_of("code"), plain_texts(0.7)[KINDS.index("code")])
    with pytest.raises(CacheLostError):
        target.step()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rejection_or_block_drafts_say_what_they_were_drawn_from(target: Engine, rule: str) -> None:
    found = drafted_texts(target, 1.0, depth=4, company=6, verification=rule)
    assert sum(text.accepted for text in found) > 0
    assert all(len(draft.draft_probs) == len(draft) for text in found for draft in text.drafts)


def test_numbers_that_are_not_finite_end_a_draft_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask does not hide them from whoever reads the block later."""
    target = engine_with("early_exit", own={"layers": LEAVES_AFTER})
    computed, passes = EarlyExit._pass, 0

    def spoilt(self: EarlyExit, layers: tuple[int, ...], feeds: list[Feed]) -> Any:
        nonlocal passes
        passes += 1
        logits, are_finite = computed(self, layers, feeds)
        if passes % 3 == 0:
            for feed in feeds:
                slot = feed.blocks[feed.start // 16] * 16 + feed.start % 16
                for keys in self._target.cache.keys.values():
                    keys[slot] = torch.nan
            return logits, torch.zeros_like(are_finite)
        return logits, are_finite

    monkeypatch.setattr(EarlyExit, "_pass", spoilt)
    prompt, text = prompt_of("code"), plain_texts(0.7)[KINDS.index("code")]
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
    sequence = target.open(len(prompt), noise_key(1, 0, prompt), sampling)
    target.submit(Decode(sequence.number, 0, prompt, Draft(), 1, Lease(depth=4, drafter="early_exit")))
    (first,) = target.step()
    assert isinstance(first, Decoded)
    assert first.draft is not None
    assert len(first.draft) == 2
    target.submit(Decode(sequence.number, len(prompt) + 1, (), Draft(), 2))  # without it
    (second,) = target.step()
    assert isinstance(second, Decoded)
    assert first.verdict.tokens + second.verdict.tokens == text[:2]
    assert all(stored.isfinite().all() for stored in target._cache._stored)


def refusal(**settings: Any) -> str:
    given = {"model": str(DEMO / "target"), "cache_memory": 2**22, **drafters_with("early_exit", **settings)}
    with pytest.raises(UnsupportedModelError) as caught:
        Engine.from_settings(EngineSettings.model_validate(given))
    assert "drafters.early_exit for model=" in str(caught.value)
    return str(caught.value)


def test_layers_that_the_target_does_not_have_are_refused_by_name() -> None:
    assert "layers=6 must be 1 to 5: it has 6 layers" in refusal(layers=6)
    assert "skipped_layers=[1, 6] must be some of 0 to 5, and not all" in refusal(skipped_layers=(1, 6))
    assert "skipped_layers=[0, 1, 2, 3, 4, 5] must be some" in refusal(skipped_layers=tuple(range(6)))
    with pytest.raises(ValueError, match=r"skipped_layers=\[1\] with layers=3: give one of them"):
        TargetDrafterSettings(layers=3, skipped_layers=(1,))


def write_exits(folder: Path, sizes: dict[int, int], **more: torch.Tensor) -> Path:
    """Exits by layers that do what the demo target's norm does, of a state of so many numbers."""
    tensors = dict(more)
    for number, size in sizes.items():
        tensors[f"exits.{number}.linear.weight"] = torch.eye(size)
        tensors[f"exits.{number}.norm.weight"] = target_model().model.norm.weight.data[:size].clone()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_exit_takes_the_place_of_the_targets_norm(tmp_path: Path, target: Engine) -> None:
    folder = write_exits(tmp_path, {LEAVES_AFTER: 256})
    right = drafted_texts(target, 0.7, depth=4, company=6)
    alone = engine_with("early_exit", folder)  # there is nothing to be searched
    assert drafted_texts(alone, 0.7, depth=4, company=6) == right
    tensors = load_file(folder / "model.safetensors")
    turned = {**tensors, f"exits.{LEAVES_AFTER}.linear.weight": torch.eye(256).roll(1, 0)}
    save_file(turned, folder / "model.safetensors")
    other = drafted_texts(engine_with("early_exit", folder, {"layers": LEAVES_AFTER}), 0.7, 4, 6)
    assert [text.tokens for text in other] == [text.tokens for text in right]
    assert sum(text.accepted for text in other) < 0.5 * sum(text.accepted for text in right)


def test_auto_searches_the_exits_that_there_are(tmp_path: Path) -> None:
    drafter = drafter_of(engine_with("early_exit", write_exits(tmp_path, {2: 256, 4: 256})))
    assert isinstance(drafter, EarlyExit)
    assert drafter.candidates == [(0, 1), (0, 1, 2, 3)]


def test_exits_of_another_target_are_refused_by_what_differs(tmp_path: Path) -> None:
    refused = partial(refusal_of, "early_exit")
    write_exits(tmp_path, {3: 128})
    assert "exits.3.linear.weight is [128, 128] and must be [256, 256]" in refused(tmp_path)
    write_exits(tmp_path, {6: 256})
    assert "leaves after 6 layers of a target, and this one has 6" in refused(tmp_path)
    write_exits(tmp_path, {}, midlayer=torch.zeros(2))
    assert "not those of exits, as exits.3.linear.weight: there are ['midlayer']" in refused(tmp_path)
    write_exits(tmp_path, {2: 256, 4: 256})
    assert "no exit for layers=3: there are [2, 4]" in refused(tmp_path, layers=3)
    assert "skipped_layers=[1] have no exits" in refused(tmp_path, skipped_layers=(1,))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes all the time there is, and little of it."""
    monkeypatch.setattr(early_exit, "TRIAL_SHARE", 1e9)
    monkeypatch.setattr(exit_search, "POSITIONS", 48)


@pytest.mark.usefixtures("quick")
def test_exit_that_pays_is_searched_on_live_text(caplog: pytest.LogCaptureFixture) -> None:
    target = engine_with("early_exit")
    caplog.set_level(logging.INFO)
    for _ in range(4):
        found = drafted_texts(target, 0.7, depth=4, company=6)
        assert [text.tokens for text in found] == plain_texts(0.7)
        if any(map(len, found[0].drafts)):
            break
    (told,) = [record.message for record in caplog.records if "draft from now on" in record.message]
    assert "the first 4 layers: 0." in told
    assert any(text.accepted for text in found)
    assert target._drafting.no_drafts_because == {}


@pytest.mark.slow
def test_part_that_skips_layers_and_drafts_on_a_device_leaves_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its keys and values of accepted tokens are not the target's."""
    capturing(monkeypatch)
    target = engine_with("early_exit", own={"skipped_layers": (1, 3)})
    prompts = [prompt_of("code"), prompt_of("json")]
    plain, drafted = (rounds(target, prompts, 0.7, depth=depth) for depth in (0, 4))
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert sum(text.accepted for text in drafted) > 0


@pytest.mark.parametrize("batch_invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_chain_with_batch_invariant_numerics_begins_only_after_the_verdict_is_known(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    """What the target has computed of accepted tokens stays in its cache, to the bit."""
    capturing(monkeypatch)
    target = engine_with("early_exit", own={"layers": 2}, batch_invariant=batch_invariant)
    drafter = drafter_of(target)
    begin, begun = drafter.begin_drafts, list[bool]()

    def beginning(*given: Any) -> Any:
        found = begin(*given)
        begun.append(found is not None)
        return found

    monkeypatch.setattr(drafter, "begin_drafts", beginning)
    rounds(target, [prompt_of("json")], 0.7, depth=4)
    assert begun
    assert any(begun) is not batch_invariant


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_part_that_a_search_has_found_is_captured_a_graph_at_a_time_and_drafts_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step then waits for one at most."""
    capture = capturing(monkeypatch)
    target = engine_with("early_exit")
    at_load, watched = capture.captured, list[int]()
    drafter = drafter_of(target)
    watch = drafter.watch

    def watching(texts: Sequence[EngineSequence]) -> None:
        before = capture.captured
        watch(texts)
        watched.append(capture.captured - before)

    monkeypatch.setattr(drafter, "watch", watching)
    of_part = 2 * len(SIZES)  # graphs of its passes, and of the positions of its chains
    for _ in range(4):
        drafted_texts(target, 0.7, depth=4, company=6)
        if sum(watched) == of_part:
            break
    assert at_load == len(SIZES)  # the target's own
    assert sum(watched) == of_part
    assert max(watched) == 1
    assert isinstance(drafter, EarlyExit)
    left_out = tuple(layer for layer in range(6) if layer not in (drafter._layers or ()))
    launching = engine_with("early_exit", own={"skipped_layers": left_out}, graphs=False)
    prompts = [prompt_of("code"), prompt_of("json")]
    assert rounds(target, prompts, 0.7, depth=4) == rounds(launching, prompts, 0.7, depth=4)
    replayed = capture.replayed
    (alone,) = rounds(target, prompts[:1], 0.7, depth=4)
    assert capture.replayed - replayed == len(alone.ranks) + sum(map(len, alone.drafts))


def untrained(folder: Path) -> Path:
    """Random layers, each of which outweighs those before it: none says what the last one says."""
    write_checkpoint(folder, "llama", num_hidden_layers=6)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.weight.data *= 4.0 ** (index + 1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("quick")
def test_where_nothing_pays_it_is_said_and_decoding_is_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine_with("early_exit", model=str(untrained(tmp_path)))
    for start in range(4):
        rounds(target, [tuple(range(start, start + 20))] * 6, 0.0, depth=4)
    assert "parts of the target would pay" in target._drafting.no_drafts_because["early_exit"]
    (record,) = [record for record in caplog.records if "Decoding is plain" in record.message]
    assert (record.levelname, "the first 3 layers: 0.0" in record.message) == ("WARNING", True)
    (text,) = rounds(target, [tuple(range(20))], 0.0, depth=4)
    assert not any(map(len, text.drafts))


def test_search_takes_its_part_of_the_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    drafter = drafter_of(engine_with("early_exit"))
    tried = []

    def trial(*args: object) -> None:
        tried.append(now[0])
        now[0] += 0.1

    monkeypatch.setattr(early_exit, "trial", trial)
    for _ in range(1000):
        now[0] += 0.01
        drafter.watch([])
    assert 0.7 * early_exit.TRIAL_SHARE < 0.1 * len(tried) / now[0] <= 1.2 * early_exit.TRIAL_SHARE
