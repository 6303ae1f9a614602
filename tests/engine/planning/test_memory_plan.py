"""The plan of an engine's memory against the bytes that a real engine allocates."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from outrider.decoding.draft import MAX_NODES, Draft
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.engine.drafters.target_drafters import TargetDrafters
from outrider.engine.errors import CacheTooSmallError
from outrider.engine.forward.linear import OneDnnProduct, why_unpacked
from outrider.engine.inputs.choice_input import bytes_to_choose
from outrider.engine.inputs.context_parts import parts_of, third_length
from outrider.engine.inputs.paged_input import FEW_TILE, SPLIT_TILES
from outrider.engine.loading.weights import resolve_prefill_chunk
from outrider.engine.loop.engine import Engine
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.memory_plan import MemoryPlan, default_cache, plan_memory, resolve_cache
from outrider.engine.planning.skeleton import AliveBytes, ModelSkeleton, skeleton
from outrider.engine.settings import EngineSettings, Quantization, TargetDrafterSettings
from outrider.engine.work import Decode
from outrider.pace.settings import MAX_DEPTH
from tests.support.allocated import allocated_cache, allocated_weights, kept_by_graphs
from tests.support.capture import SIZES, capturing
from tests.support.checkpoints import ARCHITECTURES, VOCAB_SIZE, write_checkpoint
from tests.support.dflash import write_dflash
from tests.support.eagle3 import P_EAGLE, write_eagle3
from tests.support.functions import needs_functions
from tests.support.heads import write_medusa
from tests.support.hidden_states import Reader
from tests.support.model import forward_of, model_of
from tests.support.mtp import write_demo
from tests.support.target_drafters import drafter_of, drafters_with

MEMORY = 2**30
RUNNING = 4
DEMO = Path(__file__).parents[3] / "outrider" / "demo" / "pair"


MODELS = [
    ("target", None),
    ("draft", None),
    pytest.param(("target", "int8"), marks=pytest.mark.slow),
    ("target", "int4"),
    ("llama", None),
    ("qwen2", None),
    ("gpt2", None),
    ("qwen3_moe", None),
    ("deepseek_v3", None),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda pair: " ".join(filter(None, pair)))
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    name, quantization = request.param
    is_demo = name in ("target", "draft")
    folder = DEMO / name if is_demo else write_checkpoint(tmp_path_factory.mktemp(name), name)
    return EngineSettings(
        model=str(folder),
        quantization=quantization,
        device="cpu",
        cache_memory=0.02,
        max_sequences=RUNNING,
        prefill_chunk=64,
    )


@pytest.fixture(scope="module")
def engine(settings: EngineSettings) -> Engine:
    return Engine.from_settings(settings.model_copy(update={"cache_memory": int(0.02 * MEMORY)}))


@pytest.fixture(scope="module")
def plan(settings: EngineSettings) -> MemoryPlan:
    return plan_memory(skeleton(settings), settings, MEMORY)


@pytest.mark.slow_beyond_first
def test_weights_and_cache_take_what_was_planned(engine: Engine, plan: MemoryPlan) -> None:
    assert plan.cache == allocated_cache(engine._cache)
    assert plan.num_blocks == engine._cache.pool.num_blocks
    assert plan.weights == pytest.approx(allocated_weights(model_of(engine)), rel=0.01)
    assert (plan.vocab_size, plan.context_length) == (engine.vocab_size, engine.max_length)


@needs_functions
def test_plan_of_a_narrow_cache_counts_its_bytes_and_the_blocks_that_are_widened(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    wide = EngineSettings(model=str(folder), cache_memory=2**20, max_sequences=RUNNING, prefill_chunk=64)
    narrow = wide.model_copy(update={"cache_dtype": "float8_e4m3fn"})
    plans = [plan_memory(skeleton(settings), settings, MEMORY) for settings in (wide, narrow)]
    assert plans[0].block == 4 * plans[1].block
    assert plans[0].activations < plans[1].activations
    assert plans[1].cache == allocated_cache(Engine.from_settings(narrow)._cache)
    check_largest_step(narrow)


def test_plan_of_a_hybrid_counts_its_states(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5_text")
    settings = EngineSettings(
        model=str(folder), device="cpu", cache_memory=2**20, max_sequences=RUNNING, prefill_chunk=64
    )
    planned = plan_memory(skeleton(settings), settings, MEMORY)
    assert planned.cache == allocated_cache(Engine.from_settings(settings)._cache)
    with pytest.raises(CacheTooSmallError, match="or max_sequences below 4000, whose states take"):
        resolve_cache(
            skeleton(settings),
            settings.model_copy(update={"cache_memory": None, "max_sequences": 4000, "device": "cuda"}),
            MEMORY,
        )


def test_without_packed_layers_a_tied_embedding_is_planned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("this processor cannot")

    folder = write_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    settings = EngineSettings(model=str(folder), dtype="bfloat16", device="cpu", cache_memory=2**22)
    monkeypatch.setattr(OneDnnProduct, "__init__", refuse)
    why_unpacked.cache_clear()
    try:
        plan = plan_memory(skeleton(settings), settings, MEMORY)
        engine = Engine.from_settings(settings)
    finally:
        why_unpacked.cache_clear()
    assert plan.weights == pytest.approx(allocated_weights(model_of(engine)), rel=0.01)


@pytest.mark.slow_beyond_first
def test_largest_step_takes_no_more_than_was_planned(settings: EngineSettings) -> None:
    check_largest_step(settings)


def check_largest_step(settings: EngineSettings) -> None:
    """All sequences that may run verify the deepest Drafts at once, after prompts that fill a chunk."""
    model = skeleton(settings)
    length = resolve_prefill_chunk(settings) // RUNNING
    blocks = RUNNING * -(-(length + 1 + MAX_DEPTH) // settings.block_size)
    cache = blocks * block_bytes(settings, model.layers, model.dtype)
    settings = settings.model_copy(update={"cache_memory": cache})
    engine = Engine.from_settings(settings)
    lease = Lease(depth=MAX_DEPTH, drafter=next(iter(settings.drafters), ""))
    for number in range(RUNNING):
        sequence = engine.open(length, number, Sampling(temperature=1.0, max_tokens=17, logit_bias={5: 1.0}))
        draft = Draft.chain(tuple(range(3, 3 + MAX_DEPTH)))
        prompt = tuple(range(number, number + length))
        engine.submit(Decode(sequence.number, 0, prompt, draft, 1, lease))
    with AliveBytes() as alive:
        assert len(engine.step()) == RUNNING
    planned = plan_memory(model, settings, MEMORY).activations
    assert 0.3 * planned < alive.peak < planned


def test_cache_holds_so_many_sequences(plan: MemoryPlan) -> None:
    assert plan.sequences(plan.num_blocks * plan.block_size) == 1
    assert plan.sequences(plan.num_blocks * plan.block_size + 1) == 0
    assert plan.sequences(1) == plan.num_blocks
    assert plan.total == plan.weights + plan.cache + plan.activations + plan.graphs + plan.runtime


def with_drafter(folder: Path, kind: str | None, **own: int) -> EngineSettings:
    """Plan of the demo target."""
    heads: dict[str, Callable[[Path], Path]] = {
        "medusa": write_medusa,
        "eagle3": write_eagle3,
        "peagle": partial(write_eagle3, form=P_EAGLE),
        "dflash": write_dflash,
    }
    checkpoint = heads[kind](folder) if kind is not None and kind in heads else None
    return EngineSettings(
        model=str(write_demo(folder) if kind == "mtp" else DEMO / "target"),
        dtype="float32",
        device="cpu",
        cache_memory=2**24,
        drafters={} if kind is None else drafters_with(kind, checkpoint, **own)["drafters"],
    )


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        "dflash",
        "mtp",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("medusa", "peagle")),
    ],
)
def test_head_beside_the_target_is_planned_with_it(tmp_path: Path, kind: str) -> None:
    settings = with_drafter(tmp_path, kind)
    planned, without = (
        plan_memory(skeleton(of), of, MEMORY)
        for of in (settings, settings.model_copy(update={"drafters": {}}))
    )
    target = Engine.from_settings(settings)
    drafter = drafter_of(target)
    of_head = {
        "medusa": lambda: drafter._heads,  # type: ignore[attr-defined]
        "eagle3": lambda: drafter._head,  # type: ignore[attr-defined]
        "peagle": lambda: drafter._head,  # type: ignore[attr-defined]
        "dflash": lambda: drafter._head,  # type: ignore[attr-defined]
        "mtp": lambda: drafter._model.layers,  # type: ignore[attr-defined]
    }[kind]()
    assert planned.weights - without.weights == pytest.approx(allocated_weights(of_head), rel=0.01)
    assert planned.num_blocks == target._cache.pool.num_blocks
    own = drafter._cache._stored if kind != "medusa" else []  # type: ignore[attr-defined]
    assert planned.cache == allocated_cache(target._cache) + sum(stored.nbytes for stored in own)
    assert (planned.num_blocks < without.num_blocks) == (kind != "medusa")
    waiting = 0 if kind == "medusa" else drafter._waiting._states.nbytes  # type: ignore[attr-defined]
    of_step = planned.activations - without.activations - waiting
    assert (of_step > 0) == (kind in ("eagle3", "peagle", "dflash"))  # the last state is there anyway


@pytest.mark.parametrize(
    "kind", ["medusa", "dflash", pytest.param("eagle3", marks=pytest.mark.slow), "early_exit"]
)
def test_largest_step_with_a_head_takes_no_more_than_was_planned(tmp_path: Path, kind: str) -> None:
    small = {"max_sequences": RUNNING, "prefill_chunk": 64}
    check_largest_step(with_drafter(tmp_path, kind).model_copy(update=small))


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "kind",
    [
        "adapters",
        "eagle3",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (None, "medusa", "mtp", "early_exit")),
    ],
)
def test_graphs_keep_what_was_planned_those_of_a_drafter_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    """Planned bytes are exact, next to the memory that all graphs compute with in turn."""
    capturing(monkeypatch)
    folder = {"adapter_folder": str(tmp_path)} if kind == "adapters" else {}
    kind = None if kind == "adapters" else kind
    settings = with_drafter(tmp_path, kind, **{"layers": 3} if kind == "early_exit" else {})
    settings = settings.model_copy(update=folder)
    engine = Engine.from_settings(settings)
    kept = kept_by_graphs(forward_of(engine))
    if kind is not None:
        kept += kept_by_graphs(drafter_of(engine))
    model = skeleton(settings)
    widest, context, rows = (
        max(dim for _, _, dim in model.layers_of(1).values()),
        model.context_length,
        SIZES[-1],
    )
    slots = forward_of(engine).tables.on_host.shape[1] * settings.block_size
    held = SPLIT_TILES * FEW_TILE * parts_of(slots, third_length(context))  # parts of all rows
    parts = held * model.query_heads_of(1) * (widest + 2) * 4
    planned = plan_memory(model, settings.model_copy(update={"device": "cuda"}), MEMORY)
    assert planned.graphs == kept + model.activation_bytes(rows, rows) + parts


def test_targets_own_layers_are_planned_once() -> None:
    plain = EngineSettings(model=str(DEMO / "target"), device="cpu", cache_memory=2**24)
    settings = plain.model_copy(update={"drafters": {"early_exit": TargetDrafterSettings()}})
    assert plan_memory(skeleton(settings), settings, MEMORY) == plan_memory(skeleton(plain), plain, MEMORY)


def test_of_layers_that_a_drafter_does_not_read_no_states_are_planned(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", num_hidden_layers=12)
    config = AutoConfig.from_pretrained(folder)
    planned, without = (
        ModelSkeleton(config, "llama", torch.float32, drafters=drafters).activation_bytes(512, 1)
        for drafters in (TargetDrafters([Reader((2, 6, 9))]), None)
    )
    assert planned - without == 3 * 512 * config.hidden_size * 4


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_is_planned_from_its_config_alone(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path, kind)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    model = skeleton(EngineSettings(model=str(folder)))
    assert len(model.layers) + len(model.states) == 3
    assert model.activation_bytes(32, 8) > 32 * 64 * 4 + 8 * VOCAB_SIZE * 4


@pytest.fixture(scope="module")
def large() -> ModelSkeleton:
    """The shapes of Llama 3.1 70B. Nothing of it is allocated."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        dtype=torch.bfloat16,
    )
    return ModelSkeleton(config, "70B")


@pytest.mark.slow
def test_large_model_over_several_devices(large: ModelSkeleton) -> None:
    assert large.parameters == 70_553_706_496  # as its card says: 70.6 B
    whole = large.weight_bytes()
    assert whole == pytest.approx(2 * large.parameters, rel=1e-6)
    norms = (2 * 80 + 1) * 8192 * 2
    assert large.weight_bytes(4) == pytest.approx((whole - norms) / 4 + norms, rel=1e-5)
    on_cuda = EngineSettings(model="70B", device="cuda", cache_memory=0.3, tensor_parallel=4)
    plan = plan_memory(large, on_cuda, 80 * 10**9)
    assert plan.num_blocks == int(0.3 * 80e9) // (80 * 2 * 2 * 128 * 2 * 16)  # two heads a device
    alone = on_cuda.model_copy(update={"tensor_parallel": 1})
    assert 0 < plan.graphs < plan_memory(large, alone, 80 * 10**9).graphs


def test_plan_of_a_gpu_row_of_logits_adds_what_the_kernels_take_to_choose(large: ModelSkeleton) -> None:
    """Beyond the rows that torch adjusts at once; a float32 copy of a row alone takes more."""
    settings = EngineSettings(model="70B", device="cuda", cache_memory=0.3, tensor_parallel=4, graphs=False)
    fewer, more = (
        plan_memory(large, settings.model_copy(update={"max_sequences": number}), 80 * 10**9).activations
        for number in (64, 65)
    )
    rows, chunk = 1 + MAX_DEPTH, resolve_prefill_chunk(settings)
    passed = large.activation_bytes(chunk + 65 * rows, 65 * rows)
    passed -= large.activation_bytes(chunk + 64 * rows, 64 * rows)
    of_tables = -(-(large.context_length + MAX_NODES) // settings.block_size) * 4  # a sequence more
    chosen = more - fewer - passed - of_tables
    assert chosen == bytes_to_choose(rows, large.vocab_size) < rows * large.vocab_size * 4


@needs_functions
@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "are_gathered"),
    [("float32", False, False), ("bfloat16", True, False), ("bfloat16", False, True)],
)
def test_plan_counts_gathered_blocks_if_attention_gathers_them(
    dtype: Any, batch_invariant: bool, are_gathered: bool
) -> None:
    """A cache of twice the size changes nothing else."""
    settings = EngineSettings(
        model=str(DEMO / "target"),
        dtype=dtype,
        device="cpu",
        max_sequences=1,
        prefill_chunk=8,
        batch_invariant=batch_invariant,
    )
    model = skeleton(settings)
    small, large = (
        plan_memory(model, settings.model_copy(update={"cache_memory": size}), MEMORY).activations
        for size in (2**22, 2**23)
    )
    assert (large > small) == are_gathered


@pytest.mark.parametrize(("quantization", "share"), [("int8", 1 / 2), ("int4", 5 / 16)])
def test_quantized_weights_take_their_bits_and_the_output_projection_8(
    large: ModelSkeleton, quantization: Quantization, share: float
) -> None:
    embedding = 128256 * 8192
    expected = share * (large.weight_bytes() - 2 * 2 * embedding) + (2 + 1) * embedding
    assert large.weight_bytes(quantization=quantization) == pytest.approx(expected, rel=1e-3)


LARGE_ON_CUDA = EngineSettings(model="70B", device="cuda", tensor_parallel=4, max_sequences=64)


def test_by_default_a_cache_on_a_gpu_takes_what_the_plan_leaves_but_a_margin(large: ModelSkeleton) -> None:
    settings = resolve_cache(large, LARGE_ON_CUDA, 80 * 10**9)
    plan = plan_memory(large, settings, 80 * 10**9)
    assert plan == plan_memory(large, LARGE_ON_CUDA, 80 * 10**9)
    assert 0 <= 0.95 * 80e9 - plan.total < 2 * plan.block
    assert plan.cache > 35e9  # 16 in a fifth of the device


def test_part_of_a_gpu_holds_all_that_its_engine_takes(large: ModelSkeleton) -> None:
    settings = LARGE_ON_CUDA.model_copy(update={"device_share": 0.6})
    plan = plan_memory(large, settings, 80 * 10**9)
    assert 0 <= 0.95 * 0.6 * 80e9 - plan.total < 2 * plan.block


def test_model_that_leaves_no_room_for_a_cache_is_refused(large: ModelSkeleton) -> None:
    settings = LARGE_ON_CUDA.model_copy(update={"device_share": 0.4})
    with pytest.raises(
        CacheTooSmallError, match=r"model='70B' leaves no room for a cache in 0.4 of a device"
    ):
        resolve_cache(large, settings, 80 * 10**9)


@pytest.mark.parametrize(
    ("memory", "share", "expected"),
    [(10**12, 1.0, None), (10**8, 1.0, 0.2), (10**8, 0.5, 0.2), (10**8, 0.2, 0.1), (10**8, 0.1, 0.05)],
)
def test_by_default_a_cache_on_a_cpu_is_what_its_sequences_can_use_up_to_a_share(
    memory: int, share: float, expected: float | None
) -> None:
    settings = EngineSettings(
        model=str(DEMO / "target"),
        device="cpu",
        dtype="float32",
        max_sequences=3,
        block_size=24,
        device_share=share,
    )
    model = skeleton(settings)
    block = block_bytes(settings, model.layers, model.dtype)
    blocks = (
        3 * 86 if expected is None else int(expected * memory) // block
    )  # 86 blocks of 24 for 2,048 tokens
    assert default_cache(model, settings, memory) == blocks * block


def test_engine_resolves_its_cache_as_planned(tmp_path: Path) -> None:
    settings = EngineSettings(model=str(write_checkpoint(tmp_path, "llama")), max_sequences=2, threads=1)
    engine = Engine.from_settings(settings)
    assert settings.cache_memory is None
    assert engine.settings.cache_memory == default_cache(skeleton(settings), settings, 10**12)
    assert engine._cache.capacity == 2 * engine.max_length
