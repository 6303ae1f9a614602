"""Target drafters on a GPU replay graphs, and draft what they draft on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outrider.engine.forward.graphs
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.drafters.drafts_under_way import DraftForeseen
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded, Result, plain_decoding
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.demo_pair import prompt_of
from tests.support.eagle3 import write_random_eagle3
from tests.support.gpu import gpu
from tests.support.mtp import write_target
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda
from tests.support.target_drafters import Drafted, drafter_of, drafters_with, engine_with, rounds

pytestmark = needs_compiler
slow = pytest.mark.slow  # Triton's interpreter takes its time

PROMPTS = [(5, 9, 33, 5, 9, 33, 5, 9), (77, 12, 4), (3, 4, 5, 6, 7), (8, 9, 10)]
DEPTH = 3
DECODED = 7  # tokens, plainly
DRAFTERS = ("eagle3", "mtp", "medusa", "early_exit")
QUICK = [pytest.param(drafter, marks=() if drafter == "eagle3" else slow) for drafter in DRAFTERS]
# Launches of a Draft with DEPTH positions that brings new blocks. Pass by pass they would be some hundred.
LAUNCHES = {"eagle3": 17, "mtp": 16, "medusa": 22, "early_exit": 8}
LAUNCHES_OF_TARGET = 5  # launches of a step that verifies chains, with the choice of its tokens
WITH_CACHE = ("eagle3", "mtp")  # drafters that take in each token
SAMPLINGS: dict[str, dict[str, Any]] = {
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "ends": {"stop_token_ids": tuple(range(3, 60))},
    "text": {"repetition_penalty": 1.3},
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(outrider.engine.forward.graphs, "CAPTURED_SIZES", (1, 4, 16))
    return {"cache_memory": 2**21, "block_size": 8, "self_check": False, "dtype": "float32"}


@pytest.fixture
def settings(given: dict[str, Any], tmp_path: Path, drafter: str) -> dict[str, Any]:
    if drafter == "mtp":
        return {**given, "model": str(write_target(tmp_path, "qwen3")), **drafters_with(drafter)}
    model = write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=2)
    if drafter == "early_exit":
        return {**given, "model": str(model), **drafters_with(drafter, layers=1)}
    write = {"eagle3": write_random_eagle3, "medusa": write_medusa}[drafter]
    return {**given, "model": str(model), **drafters_with(drafter, write(tmp_path / "head", model))}


def write_medusa(folder: Path, model: Path) -> Path:
    """Random, as below."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for head in range(DEPTH):
        tensors[f"{head}.0.linear.weight"] = 0.1 * torch.randn(64, 64, generator=generator)
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB_SIZE, 64, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def engine_of(settings: dict[str, Any], **more: Any) -> Engine:
    return Engine.from_settings(EngineSettings.model_validate({**settings, **more}))


def drafted(
    settings: dict[str, Any], device: str, alternatives: int = 2, **more: Any
) -> tuple[list[Drafted], Engine]:
    engine = engine_of(settings, device=device, **more)
    return rounds(engine, PROMPTS[:2], 0.7, DEPTH, alternatives, max_tokens=10), engine


@slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_those_of_the_cpu_and_passes_are_replays(drafter: str, settings: dict[str, Any]) -> None:
    expected, _ = drafted(settings, "cpu")
    with gpu() as cuda:
        found, engine = drafted(settings, "cuda")
        assert engine.runner.slow_because == ()
        if cuda is not None:  # launches of a real GPU are not counted
            cuda.counts = Counts()
            more = rounds(engine, PROMPTS[:1], 0.7, DEPTH, max_tokens=4)
            replays = sum(n for cause, n in cuda.counts.launches.items() if "graph.replay" in cause)
            passes = len(more[0].ranks)  # for each Verdict the target's,
            passes += sum(len(draft) for draft in more[0].drafts)  # and one for each position
            if drafter in WITH_CACHE:
                # For each Draft the head's over what stands; the first position has logits alone.
                passes += len([draft for draft in more[0].drafts if draft])
            assert replays == passes
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
    assert any(not draft.is_chain for text in found for draft in text.drafts)


@slow
def test_colocated_drafts_are_those_of_the_cpu_and_its_engine_has_graphs(given: dict[str, Any]) -> None:
    def drafted_on(device: str) -> tuple[list[Drafted], Engine]:
        engine = engine_with("colocated", DEMO / "draft", device=device, **given)
        return rounds(engine, [prompt_of("json")[:8]], 0.7, DEPTH, alternatives=2, max_tokens=6), engine

    given |= {"cache_memory": 2**22}
    expected, _ = drafted_on("cpu")
    with gpu():
        found, engine = drafted_on("cuda")
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
    assert any(draft for text in found for draft in text.drafts)
    assert engine.runner.slow_because == ()


def counts_of_steps(
    engine: Engine, cuda: SimulatedCuda, prompts: list[tuple[int, ...]], alternatives: int = 0
) -> list[Counts]:
    """Counts of the steps of rounds: each is a pass of the target, with the Drafts that follow."""
    step, counted = engine.step, list[Counts]()

    def counting() -> list[Result]:
        cuda.counts = Counts()
        results = step()
        counted.append(cuda.counts)
        return results

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "step", counting)
        rounds(engine, prompts, 0.7, DEPTH, alternatives, max_tokens=2 * DEPTH + 3)
    return counted


def check_budget(counts: Counts, launches: int, are_begun: bool) -> None:
    """Checks a step that verifies Drafts and makes the next Drafts.

    are_begun: whether the device has these to make before the host knows the Verdicts.
    """
    totals = counts.totals()
    assert totals["launches"] <= launches, counts.report()
    assert totals["waits"] == totals["pinned_copies"] == totals["copies_out"] == 2, counts.report()
    assert totals["busy_waits"] == are_begun, counts.report()
    assert totals["pageable_copies"] == 0, counts.report()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", QUICK)
def test_draft_copies_and_waits_once_however_deep_and_for_however_many(
    drafter: str, settings: dict[str, Any]
) -> None:
    with simulated_cuda() as cuda:
        engine = engine_of(settings, device="cuda")
        alone, in_company = (counts_of_steps(engine, cuda, PROMPTS[:count])[1] for count in (1, 4))
    check_budget(in_company, LAUNCHES_OF_TARGET + LAUNCHES[drafter], are_begun=True)
    new_blocks = in_company.launches.total() - alone.launches.total()
    assert new_blocks <= 1, in_company.report()  # a launch brings those of all sequences
    assert in_company.totals() == {**alone.totals(), "launches": in_company.launches.total()}


@slow
@pytest.mark.parametrize("alternatives", [0, 2])
def test_draft_of_a_model_beside_the_target_begins_on_the_device_and_copies_and_waits_once(
    given: dict[str, Any], alternatives: int
) -> None:
    given |= {"cache_memory": 2**22, "device": "cuda"}
    prompts = [prompt_of(kind)[:8] for kind in ("json", "code")]
    with simulated_cuda() as cuda:
        engine = engine_with("colocated", DEMO / "draft", **given)
        _, counts, *_ = counts_of_steps(engine, cuda, prompts, alternatives)
    check_budget(counts, LAUNCHES_OF_TARGET + 8 + DEPTH - 1, are_begun=True)


@slow
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_chains_of_a_model_beside_the_target_are_those_of_the_cpu(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_foreseen: bool
) -> None:
    """Texts go from rounds to plain decoding and back. If no Draft is foreseen, each is made again."""
    given |= {"cache_memory": 2**22}
    own, kinds = [*SAMPLINGS.values()], ("json", "code", "prose")

    def texts(device: str) -> list[Drafted]:
        engine = engine_with("colocated", DEMO / "draft", device=device, **given)
        prompts = [prompt_of(kind)[:8] for kind in kinds]
        found = rounds(engine, prompts, 0.7, DEPTH, max_tokens=14, ignore_eos=False, own=own)
        found += rounds(engine, prompts[:1], 0.7, DEPTH, plain=(4, 8), max_tokens=16)
        return found + rounds(engine, prompts[:2], 0.7, DEPTH, alternatives=3, max_tokens=14)

    expected = texts("cpu")
    with gpu(), monkeypatch.context() as patched:
        if not is_foreseen:
            patched.setattr(DraftForeseen, "follows", lambda *_: False)
        found = texts("cuda")
    assert found == expected
    assert [text.of_host > 0 for text in found] == [sampling is SAMPLINGS["text"] for sampling in own] + [
        False
    ] * 3
    assert {draft.depth for text in found for draft in text.drafts} > {1, DEPTH}


@slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_of_the_device_are_those_of_the_cpu(drafter: str, settings: dict[str, Any]) -> None:
    """Settings are those that a device applies, ends within a chain, and those that only the host applies."""
    own = [*SAMPLINGS.values()]

    def texts(device: str) -> list[Drafted]:
        engine = engine_of(settings, device=device)
        return rounds(engine, PROMPTS[: len(own)], 0.7, DEPTH, max_tokens=10, ignore_eos=False, own=own)

    expected = texts("cpu")
    with gpu():
        found = texts("cuda")
    assert found == expected
    assert [text.of_host > 0 for text in found] == [sampling is SAMPLINGS["text"] for sampling in own]
    assert {draft.depth for text in found for draft in text.drafts} > {1, DEPTH}


@slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_draft_that_follows_no_verdict_is_made_again(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is not finite has the host cut a Verdict off. Here it is as if each were cut off."""
    expected, _ = drafted(settings, "cpu", alternatives=0)
    monkeypatch.setattr(DraftForeseen, "follows", lambda *_: False)
    with gpu():
        found, _ = drafted(settings, "cuda", alternatives=0)
    assert found == expected


@slow
@pytest.mark.parametrize("drafter", ["eagle3", "medusa", "early_exit"])
def test_without_graphs_it_drafts_the_same(drafter: str, settings: dict[str, Any]) -> None:
    expected, _ = drafted(settings, "cpu")
    with gpu():
        found, engine = drafted(settings, "cuda", graphs=False)
    assert [(text.tokens, text.drafts) for text in found] == [(text.tokens, text.drafts) for text in expected]
    assert engine.runner.slow_because == ("no step has a CUDA graph: graphs are off in the settings",)


def decoded_then_drafted(engine: Engine, ends: tuple[int, ...]) -> list[tuple[list[int], list[Draft]]]:
    """Two texts, the first of which ends with one of these tokens, and the Drafts that follow the others."""
    texts: dict[int, tuple[list[int], list[Draft]]] = {}
    for prompt, stops in zip(PROMPTS, (ends, ()), strict=False):
        settings = Sampling(temperature=0.7, max_tokens=20, ignore_eos=True, stop_token_ids=stops)
        sequence = engine.open(len(prompt), noise_key(1, 0, prompt), settings)
        texts[sequence.number] = [], []
        engine.submit(plain_decoding(sequence.number, 0, prompt, DECODED))
    while engine.has_work:
        for result in engine.step():
            assert isinstance(result, Decoded)
            tokens, drafts = texts[result.sequence]
            tokens += [result.verdict.tokens[-1]] if isinstance(result, Decoded) else result.verdict.tokens
            if isinstance(result, Decoded) and result.draft is not None:
                drafts.append(result.draft)
            if result.finish is not None:
                engine.close(engine.sequence(result.sequence))
            elif DECODED <= len(tokens) < DECODED + 5:
                draft, length = (
                    drafts[-1] if drafts else Draft(),
                    len(engine.sequence(result.sequence).tokens),
                )
                lease = Lease(depth=DEPTH, drafter=drafter_of(engine).info.name)
                engine.submit(Decode(result.sequence, length, (), draft, 1 + len(drafts), lease))
            elif len(tokens) > DECODED:
                engine.close(engine.sequence(result.sequence))
    return [*texts.values()]


@slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_plain_decoding_is_launched_early_beside_it(drafter: str, settings: dict[str, Any]) -> None:
    """It drafts from the states of steps after which others were launched before it could read them."""
    on_cpu = engine_of(settings, device="cpu")
    end = decoded_then_drafted(on_cpu, ())[0][0][3]
    expected = decoded_then_drafted(on_cpu, (end,))
    assert expected[0][0].index(end) == len(expected[0][0]) - 1 < DECODED
    assert expected[1][1]
    with gpu() as cuda:
        engine = engine_of(settings, device="cuda")
        if cuda is not None:
            cuda.counts = Counts()
        assert decoded_then_drafted(engine, (end,)) == expected
        if cuda is not None:
            # A head with a cache has something to take in while the last step is under way.
            has_cache = drafter in WITH_CACHE
            causes = cuda.counts.launches.items()
            begun = sum(count for cause, count in causes if "follow_chains" in cause)
            assert begun > 0
            assert cuda.counts.busy_waits.total() == DECODED - 1 + has_cache + begun, cuda.counts.report()
            assert not cuda.counts.pageable_copies, cuda.counts.report()
