"""A model shared by two processes says what it says in one, whatever is asked of it."""

import ctypes
import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.settings import Sampling
from outrider.drafters.ngram import NgramIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.errors import RankLostError, UnsupportedModelError
from outrider.engine.forward.attention import ATTENTION, Paged, attend
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import BlockTables
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, Output, generate
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.parallel.step_channel import FRAME, RING
from outrider.engine.planning.memory_plan import plan_memory
from outrider.engine.planning.skeleton import skeleton
from outrider.engine.settings import EngineSettings
from tests.support.allocated import allocated_cache, allocated_weights
from tests.support.checkpoints import ARCHITECTURES, COMMON, NEAR_TIE, VOCAB_SIZE, write_checkpoint
from tests.support.near_ties import margin
from tests.support.ranks import Ranks, follow_to_the_end

TOKENS = 24
TOGETHER = 30
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
)
# Chains and trees, by a drafter that is right, by one that is not, and from n-grams.
MODES: dict[str, tuple[str | None, int, int]] = {
    "plain": (None, 0, 0),
    "its own": ("target", 5, 0),
    "its own trees": ("target", 3, 3),
    "another's trees": ("other", 3, 6),
    "n-grams": ("n-gram", 4, 0),
}


def settings_of(folder: Path, **fields: Any) -> EngineSettings:
    """So little cache that sequences are preempted, so small chunks that prompts take several steps."""
    given = {"block_size": 4, "cache_memory": 2**20, "prefill_chunk": 48, "dtype": "float32", "threads": 1}
    return EngineSettings.model_validate({"model": str(folder), **given, **fields})


def requests(count: int) -> list[OfflineRequest]:
    """Prompts of many lengths, some with a beginning in common."""
    rng = random.Random(4)
    stems = [tuple(rng.choices(range(3, VOCAB_SIZE), k=length)) for length in (9, 30, 61)]
    made = []
    for number in range(count):
        prompt = (*rng.choice(stems), *rng.choices(range(3, VOCAB_SIZE), k=rng.randrange(1, 20)))
        sampling = Sampling(max_tokens=TOKENS, **SAMPLINGS[number % len(SAMPLINGS)])
        made.append(OfflineRequest(prompt, sampling, number))
    return made


def drafter_of(kind: str | None, drafts: dict[str, Engine]) -> Drafter | None:
    if kind is None:
        return None
    return IndexDrafter(NgramIndex) if kind == "n-gram" else DraftModel(drafts[kind])


def answers(target: Engine, drafts: dict[str, Engine], count: int) -> list[list[Output]]:
    """Answers by mode, in parts that run together."""
    asked = requests(count)
    every = []
    for number, (kind, depth, alternatives) in enumerate(MODES.values()):
        part = asked[number :: len(MODES)]
        drafter = drafter_of(kind, drafts)
        every.append(
            [
                output
                for start in range(0, len(part), TOGETHER)
                for output in generate(target, drafter, part[start : start + TOGETHER], depth, alternatives)
            ]
        )
    return every


def lead(group: RankGroup, shared: EngineSettings, others: dict[str, EngineSettings], count: int) -> Any:
    engine = Engine.from_settings(shared, group)
    drafts = {name: Engine.from_settings(settings) for name, settings in others.items()}
    shapes = {tuple(keys.shape[1:]) for keys in engine._cache.keys.values()}
    outputs = answers(engine, drafts, count)
    engine.shut_down()
    return outputs, shapes


def margin_at(folder: Path, request: OfflineRequest, tokens: tuple[int, ...], place: int) -> float:
    """How far apart the two largest perturbed logits were, by a plain forward pass of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generated = list(tokens[:place])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*request.prompt, *generated]])).logits[0, -1:]
    position = len(request.prompt) + place
    row = ChoiceContext(
        request.sampling, request.noise_key, position, request.prompt, generated, (), frozenset()
    )
    return margin(logits, row)


def check(ranks: Ranks, folder: Path, other: Path, count: int) -> None:
    """All modes of two processes against plain decoding in one."""
    alone = settings_of(folder)
    shared = alone.model_copy(update={"tensor_parallel": 2})
    drafts = {"target": alone, "other": settings_of(other)}
    [(shared_outputs, shapes), _] = ranks.run(lead, follow_to_the_end, shared, drafts, count)
    target = Engine.from_settings(alone)
    assert shapes == {(1, 16)}  # each rank has one of two key/value heads
    asked = requests(count)
    near_ties = accepted = refused = 0
    for number, (name, outputs) in enumerate(zip(MODES, shared_outputs, strict=True)):
        part = asked[number :: len(MODES)]
        plain = generate(target, None, part, 0)
        assert len({output.tokens for output in plain}) > len(part) // 2
        accepted += sum(output.accepted for output in outputs)
        refused += sum(output.drafted - output.accepted for output in outputs)
        for request, output, expected in zip(part, outputs, plain, strict=True):
            if output.tokens == expected.tokens:
                continue
            pairs = enumerate(zip(expected.tokens, output.tokens, strict=False))
            place = next(i for i, (ours, theirs) in pairs if ours != theirs)
            margin = margin_at(folder, request, expected.tokens, place)
            print(f"{name}: {request.noise_key} differs at {place}, margin {margin:.1e}")
            assert margin <= NEAR_TIE
            near_ties += 1
    assert near_ties <= max(1, count // 100)
    assert accepted > 5 * count
    assert refused > 5 * count
    print(f"{count} requests compared, {near_ties} near-ties")


# The second kind has biases, one matrix for tokens in and out, and one token too many to share evenly.
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        pytest.param("llama", {}, id="llama", marks=pytest.mark.slow),
        pytest.param("qwen2", {"tie_word_embeddings": True, "vocab_size": VOCAB_SIZE + 1}, id="qwen2"),
    ],
)
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_two_processes_say_what_one_says(
    ranks: Ranks, tmp_path: Path, kind: str, fields: dict[str, Any], count: int
) -> None:
    folders = [write_checkpoint(tmp_path / str(seed), kind, seed, **fields) for seed in (0, 1)]
    check(ranks, folders[0], folders[1], count)


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "fields", "size", "named"),
    [
        ("llama", {"num_attention_heads": 6, "hidden_size": 96}, 4, "num_attention_heads=6"),
        (
            "llama",
            {"num_attention_heads": 6, "hidden_size": 96},
            3,
            "num_key_value_heads=2.*multiple of it that divides",
        ),
        (
            "hunyuan_v1_dense",
            {"head_dim": 16, "rope_parameters": DEFAULT_ROPE},
            2,
            "shares only .*every device would hold all of model.layers",
        ),
        ("mixtral", {"intermediate_size": 126}, 4, "126 features in each expert of model.layers.0.mlp,"),
        ("gpt_oss", {"intermediate_size": 126}, 4, "126 features in each expert of model.layers.0.mlp,"),
        ("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 6}, 4, "num_key_value_heads=6"),
        ("gpt2", {}, 2, "no plan to share"),
    ],
)
def test_model_that_cannot_be_shared_is_refused_by_name(
    tmp_path: Path, kind: str, fields: dict[str, Any], size: int, named: str
) -> None:
    """The config alone decides: there are no weights to load, and no group to load them into."""
    config = AutoConfig.for_model(kind, **{**COMMON, **ARCHITECTURES.get(kind, {}), **fields})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"tensor_parallel={size}.*{named}"):
        Engine.from_settings(settings_of(tmp_path, tensor_parallel=size))


def refuse_to_load(group: RankGroup, settings: EngineSettings, wrong_rank: int) -> str:
    """What a rank says when one attends with a wrong scale."""

    def broken(module: Any, *tensors: Any, **given: Any) -> Any:
        wrong = isinstance(given["outrider"], Paged) and dist.get_rank() == wrong_rank
        return attend(module, *tensors, **{**given, "scaling": given["scaling"] * (1 + wrong)})

    AttentionInterface.register(ATTENTION, broken)
    try:
        load_forward_pass(settings, group)
    except UnsupportedModelError as error:
        return str(error)
    finally:
        AttentionInterface.register(ATTENTION, attend)
    return ""


def test_all_ranks_refuse_a_model_that_one_computes_wrongly(ranks: Ranks, tmp_path: Path) -> None:
    settings = settings_of(write_checkpoint(tmp_path, "llama"), tensor_parallel=2)
    for message in ranks.run(refuse_to_load, refuse_to_load, settings, 1):
        assert "first in layer 0: packed prompts" in message
    assert ranks.run(refuse_to_load, refuse_to_load, settings, -1) == ["", ""]


def few_tables() -> BlockTables:
    return BlockTables((2, 4), 8, 0, torch.device("cpu"))


def send(group: RankGroup, lengths: list[int]) -> None:
    """Steps of so many tokens, every second of which feeds what the one before chose."""
    for number, length in enumerate(lengths):
        chosen = torch.arange(length) if number % 2 else None
        group.send(StepInput.of(few_tables(), [Feed([7] * length, 1, 0, HeldBlocks([3]), None)]), chosen)
    group.dismiss()


def receive(group: RankGroup, lengths: list[int]) -> list[tuple[int, int | None]]:
    """How many tokens came, and chosen ones with them."""
    came, tables = [], few_tables()
    while (received := group.receive(tables)) is not None:
        assert isinstance(received, tuple)
        step, chosen = received
        assert set(step.feeds[0].tokens) == {7}
        assert chosen is None or chosen.tolist() == [*range(len(chosen))]
        came.append((len(step.feeds[0].tokens), None if chosen is None else len(chosen)))
    return came


@pytest.mark.slow
@pytest.mark.parametrize("group", ["ranks", "apart"])
def test_step_of_any_length_reaches_the_other_ranks(request: pytest.FixtureRequest, group: str) -> None:
    lengths = [1, *range(FRAME - 18, FRAME - 11), 2 * RING, 2]
    [_, came] = request.getfixturevalue(group).run(send, receive, lengths)
    assert came == [(length, length if number % 2 else None) for number, length in enumerate(lengths)]


def go_on_after(group: RankGroup, ran: tuple[bool, bool]) -> str:
    """A step, and the next, each at this rank with a pass that ran or raised; what the rank says of that."""
    before, rank = group.passes, dist.get_rank()
    try:
        group.passes += ran[rank]
        if rank == 0:
            send(group, [1])
        else:
            receive(group, [1])
    except RankLostError as error:
        if group.receive(few_tables()) is None:
            return str(error)
    finally:
        group.passes = before
    return ""


def test_rank_that_failed_alone_goes_no_further(ranks: Ranks) -> None:
    assert ranks.run(go_on_after, go_on_after, (True, True)) == ["", ""]
    assert ranks.run(go_on_after, go_on_after, (False, False)) == ["", ""]
    for ran in (True, False), (False, True):
        [at_rank_0, at_rank_1] = ranks.run(go_on_after, go_on_after, ran)
        assert at_rank_0 == ""
        assert "failed at one rank alone" in at_rank_1


def load_and_look(group: RankGroup, small: EngineSettings, settings: EngineSettings) -> tuple[int, int]:
    """Private bytes at most while loading, and afterwards, beyond those before."""
    load_forward_pass(small, group)  # imports what is imported late, which takes memory too
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier models have left would be taken again unseen
    before, most, ends = private_bytes(), [0], threading.Event()

    def look() -> None:
        while not ends.wait(0.002):
            most[0] = max(most[0], private_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    forward = load_forward_pass(settings, group)
    ends.set()
    watch.join()
    after = private_bytes()
    del forward
    return most[0] - before, after - before


def private_bytes() -> int:
    """Bytes that are this process's alone: pages of mapped files do not count."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(kilobytes) * 1024


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Processes that have freed no memory: what is taken of it again is not seen."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(fresh_ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 4096}
    small = settings_of(write_checkpoint(tmp_path / "small", "llama"), tensor_parallel=2)
    folder = write_checkpoint(tmp_path / "large", "llama", **sizes)
    whole = (folder / "model.safetensors").stat().st_size
    settings = settings_of(folder, tensor_parallel=2)
    for most, after in fresh_ranks.run(load_and_look, load_and_look, small, settings):
        print(f"{whole / 1e6:.0f} MB in the file, {most / 1e6:.0f} at most, {after / 1e6:.0f} MB afterwards")
        assert after > 0.4 * whole  # it does hold its share
        assert most < 0.75 * whole


def hold(group: RankGroup, settings: EngineSettings) -> tuple[int, int]:
    forward = load_forward_pass(settings, group)
    return allocated_weights(forward.model), allocated_cache(forward.cache)


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("size", [2, 4])  # each rank has one of two key/value heads
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_each_rank_holds_what_the_memory_plan_says(
    ranks: Ranks, four_ranks: Ranks, tmp_path: Path, kind: str, size: int
) -> None:
    folder = write_checkpoint(tmp_path, kind, hidden_size=128)  # so that packed layers need no padding
    settings = settings_of(folder, tensor_parallel=size)
    plan = plan_memory(skeleton(settings), settings, 2**30)
    group = ranks if size == 2 else four_ranks
    for weights, cache in group.run(hold, hold, settings):
        assert cache == plan.cache
        assert weights == pytest.approx(plan.weights, rel=0.01)


def test_keys_of_a_fused_projection_are_planned_whole(ranks: Ranks, tmp_path: Path) -> None:
    settings = settings_of(write_checkpoint(tmp_path, "phi3"), tensor_parallel=2)
    plan = plan_memory(skeleton(settings), settings, 2**30)
    assert [cache for _, cache in ranks.run(hold, hold, settings)] == [plan.cache] * 2
