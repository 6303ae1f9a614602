"""Whether draft and target fit into their devices, told before either is started."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from transformers import LlamaConfig

from cluster.settings import DEFAULT_DRAFT, DraftSettings, Settings, WorkerSettings
from outrider.engine.loading.skeleton import ModelSkeleton, skeleton
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.memory_plan import MemoryPlan, default_cache, largest, plan_memory
from outrider.engine.planning.step_costs import StepCosts, step_costs
from outrider.engine.settings import EngineSettings, Quantization
from outrider.pace.settings import MAX_DEPTH

Role = Literal["target", "draft"]

GB = 10**9
# Shapes of Llama 3.2 1B and Llama 3.1 8B; vocabulary and context are the target's.
HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
LLAMAS: dict[str, dict[str, Any]] = {
    "1B": {
        **HEADS,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "8B": {**HEADS, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}


@dataclass(frozen=True)
class Part:
    """The replicas of one role."""

    role: Role
    group: str  # of settings
    plan: MemoryPlan  # of each device of one replica
    per_device: int  # replicas, or their ranks, that have a part on the same device
    engine: EngineSettings  # its cache in bytes where that was left open
    allowed: int  # bytes of one device that one replica may take
    replan: Callable[[EngineSettings], MemoryPlan]  # under other settings
    costs: Callable[[], StepCosts]  # of its steps

    @property
    def taken(self) -> int:
        """Bytes of one device."""
        return self.per_device * self.plan.total

    def largest_cache(self, memory: int) -> int:
        """Bytes of cache with which one replica takes at most ``memory``; 0: not with one block."""
        return self.plan.block * self._most(
            "cache_memory", self.plan.block, memory // self.plan.block, memory
        )

    def largest_step(self, memory: int) -> int:
        """Sequences in a step, with which one replica takes at most ``memory``; 0: not with one."""
        return self._most("max_sequences", 1, self.engine.max_sequences, memory)

    def _most(self, field: str, unit: int, most: int, memory: int) -> int:
        """Units of a setting: what is taken never falls when it grows."""

        def fits(count: int) -> bool:
            return self.replan(self.engine.model_copy(update={field: count * unit})).total <= memory

        return largest(fits, most)


@dataclass(frozen=True)
class Device:
    """One of those that are alike: the target comes first where the draft shares it."""

    memory: int  # bytes
    parts: tuple[Part, ...]

    @property
    def left(self) -> int:
        """Bytes; below 0 where the parts do not fit."""
        return self.memory - sum(part.taken for part in self.parts)

    def check(self) -> None:
        """Raises ValueError if something does not fit, naming what would."""
        before = 0
        for part in self.parts:
            if before + part.taken > self.memory or part.plan.total > part.allowed:
                raise ValueError(_refusal(part, self.memory, before))
            before += part.taken


class DeploymentPlan:
    """The devices of target and draft. The target never gives way: what does not fit beside it is refused."""

    def __init__(self, settings: Settings, memory: int, draft_memory: int) -> None:
        """
        Args:
            settings: with the GPUs of each worker.
            memory: bytes of each device of a target; of its machine, where it runs on the CPU.
            draft_memory: the same of a draft, unless it shares the target's device.

        Raises:
            CacheTooSmallError: the setting of a cache buys no block.
            UnsupportedModelError: a model cannot be served.
        """
        target = settings.target
        assert target.gpus is not None
        self._settings = settings
        engine, gpus = settings.target_engine(), target.gpus
        per_device = _per_device(target.most_replicas * target.tensor_parallel, gpus)
        self.target = _part("target", "target", skeleton(engine), engine, gpus, memory, per_device)
        alone = Device(memory, (self.target,))
        self._draft_name = settings.draft_name or DEFAULT_DRAFT
        self._draft = settings.draft or DraftSettings(model=target.model, gpus=min(gpus, 1.0))
        is_shared = _share_a_device(target, self._draft, per_device)
        self._beside = alone if is_shared else Device(draft_memory, ())
        self.devices = [alone]
        if settings.draft is not None:
            drafting = self.drafting(skeleton(settings.draft_engine()), settings.draft.quantization)
            self.devices = [drafting] if is_shared else [alone, drafting]

    @property
    def settings(self) -> Settings:
        """With the bytes of the caches that were left open."""
        target, draft = (
            {"cache_memory": part.engine.cache_memory} for part in (self.target, self.devices[-1].parts[-1])
        )
        return self._settings.changed(target=target, draft=draft)

    def drafting(self, model: ModelSkeleton, quantization: Quantization | None = None) -> Device:
        """The draft's device with any model in its place."""
        gpus, memory = self._draft.gpus, self._beside.memory
        assert gpus is not None
        other = self._draft.model_copy(update={"model": model.name, "quantization": quantization})
        engine = self._settings.model_copy(update={"drafts": {self._draft_name: other}}).draft_engine()
        per_device = _per_device(other.most_replicas, gpus)
        group = f"drafts.{self._draft_name}"
        draft = _part("draft", group, model, engine, gpus, memory, per_device, depth=0)
        return Device(memory, (*self._beside.parts, draft))

    def other_drafts(self) -> Iterator[tuple[str, Device]]:
        """What could draft instead, and its device."""
        target = self.target.plan
        type_name = str(target.dtype).removeprefix("torch.")
        for name, shape in LLAMAS.items():
            sizes = {"vocab_size": target.vocab_size, "max_position_embeddings": target.context_length}
            model = ModelSkeleton(LlamaConfig(**shape, **sizes), name, target.dtype)
            yield f"{name} {type_name}", self.drafting(model)
            yield f"{name} int4", self.drafting(model, "int4")
        yield "the target in int4", self.drafting(skeleton(self._settings.target_engine()), "int4")

    def check(self) -> None:
        """Raises ValueError if something does not fit, naming what would."""
        for device in self.devices:
            device.check()


def _part(
    role: Role,
    group: str,
    model: ModelSkeleton,
    engine: EngineSettings,
    gpus: float,
    memory: int,
    per_device: int,
    depth: int = MAX_DEPTH,
) -> Part:
    engine = engine.model_copy(update={"device": "cuda" if gpus else "cpu"})  # without GPUs it sees none
    allowed = memory
    if engine.cache_memory is None:
        # Where there is no room for a cache, one block is planned, and refused by its total.
        block = block_bytes(engine, model.layers_of(engine.tensor_parallel), model.dtype)
        cache = max(default_cache(model, engine, memory, depth), block)
        engine = engine.model_copy(update={"cache_memory": cache})
        allowed = int(engine.device_share * memory) if gpus else memory

    def plan(changed: EngineSettings) -> MemoryPlan:
        return plan_memory(model, changed, memory, depth)

    def costs() -> StepCosts:
        return step_costs(model, engine, on_cuda=gpus > 0)

    return Part(role, group, plan(engine), per_device, engine, allowed, plan, costs)


def _refusal(part: Part, memory: int, before: int) -> str:
    """before: bytes that others hold on the device."""
    plan = part.plan
    uses = ("weights", "cache", "activations", "graphs", "runtime")
    needs = ", ".join(f"{use} {getattr(plan, use) / GB:.2f}" for use in uses)
    beside = f" beside {before / GB:.2f} GB of the target" if before else ""
    reason = (
        f"{part.role}={plan.model!r} takes {part.taken / GB:.2f} GB ({part.per_device} times {needs}) of a "
        f"device with {memory / GB:.2f} GB{beside}"
    )
    room = (memory - before) // part.per_device
    options = []
    if cache := part.largest_cache(room):
        options.append(f"{part.group}.cache_memory={cache}")
    if sequences := part.largest_step(room):
        options.append(f"{part.group}.max_sequences={sequences}")
    if options:
        return f"{reason}: {' or '.join(options)} would fit"
    others = "another draft" if part.role == "draft" else "more target.tensor_parallel, another target"
    return f"{reason}: {others} or a larger device may fit"


def _per_device(replicas: int, gpus: float) -> int:
    """Of one role on one device, as full as Ray packs it; without GPUs the device is the machine."""
    if gpus == 0:
        return replicas
    return min(replicas, math.floor(1 / gpus)) if gpus < 1 else 1


def _share_a_device(target: WorkerSettings, draft: WorkerSettings, targets: int) -> bool:
    """targets: on one device."""
    if target.resources.keys() != draft.resources.keys():
        return False  # what is asked for by name lies on machines of its own
    if target.accelerator != draft.accelerator:
        return False
    of_target, of_draft = target.gpus or 0.0, draft.gpus or 0.0
    if of_target == of_draft == 0:
        return True
    return 0 < of_target < 1 and of_draft > 0 and targets * of_target + of_draft <= 1
