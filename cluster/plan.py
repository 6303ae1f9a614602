"""Memory plan of a deployment: whether draft and target fit into their devices, before they start."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import LlamaConfig

from cluster.groups import DEFAULT_DRAFT, DraftSettings, WorkerSettings
from cluster.settings import Settings, on_device
from outrider.engine.planning.memory import block_bytes
from outrider.engine.planning.memory_plan import MemoryPlan, default_cache, largest, plan_memory
from outrider.engine.planning.skeleton import ModelSkeleton, skeleton
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
    """Replicas of one role."""

    role: Role
    group: str  # group of settings
    plan: MemoryPlan  # plan of each device of one replica
    per_device: int  # replicas, or their ranks, on the same device
    engine: EngineSettings  # settings with the cache's bytes, given or chosen
    allowed: int  # bytes of one device that one replica may take
    replan: Callable[[EngineSettings], MemoryPlan]  # function that plans with other settings
    costs: Callable[[], StepCosts]  # function that returns the costs of its steps
    promise: str  # how far a seed reproduces a text; targets only

    @property
    def title(self) -> str:
        """Name of the role, with the draft's name unless it is the default draft."""
        return self.role if self.group in ("target", f"drafts.{DEFAULT_DRAFT}") else self.group

    @property
    def taken(self) -> int:
        """Bytes that the part takes of one device."""
        return self.per_device * self.plan.total

    def largest_cache(self, memory: int) -> int:
        """Returns the most bytes of cache with which one replica takes at most ``memory``; may be 0."""
        return self.plan.block * self._most(
            "cache_memory", self.plan.block, memory // self.plan.block, memory
        )

    def largest_step(self, memory: int) -> int:
        """Returns the most sequences of a step with which one replica takes at most ``memory``; may be 0."""
        return self._most("max_sequences", 1, self.engine.max_sequences, memory)

    def _most(self, field: str, unit: int, most: int, memory: int) -> int:
        """Returns the most units of a setting that fit; the bytes taken never fall as it grows."""

        def fits(count: int) -> bool:
            return self.replan(self.engine.model_copy(update={field: count * unit})).total <= memory

        return largest(fits, most)


@dataclass(frozen=True)
class Device:
    """One of several equal devices; if drafts share the target's device, the target comes first."""

    memory: int  # bytes
    first: WorkerSettings  # settings of the first worker on the device
    gpu: float  # share of the GPU that is taken
    parts: tuple[Part, ...]

    def takes(self, worker: WorkerSettings) -> bool:
        """Whether Ray would place a replica of this worker on the same device."""
        if self.first.resources.keys() != worker.resources.keys():
            return False  # named resources mean different machines
        if self.first.accelerator != worker.accelerator:
            return False
        if not self.first.gpus or not worker.gpus:
            return not self.first.gpus and not worker.gpus
        return self.first.gpus < 1 and self.gpu + worker.gpus <= 1

    def with_part(self, worker: WorkerSettings, part: Part) -> "Device":
        """Returns the device with another part."""
        taken = part.per_device * (worker.gpus or 0.0)
        return replace(self, gpu=self.gpu + taken, parts=(*self.parts, part))

    @property
    def left(self) -> int:
        """Free bytes; below 0 if the parts do not fit."""
        return self.memory - sum(part.taken for part in self.parts)

    def check(self) -> None:
        """Raises ValueError if a part does not fit; the message names a value that would fit."""
        before = 0
        for part in self.parts:
            if before + part.taken > self.memory or part.plan.total > part.allowed:
                raise ValueError(_refusal(part, self.memory, before))
            before += part.taken


class DeploymentPlan:
    """Devices of target and drafts. The target comes first; a part that does not fit is refused."""

    def __init__(self, settings: Settings, memories: Mapping[str, int]) -> None:
        """Plans the devices.

        Args:
            settings: settings with the GPUs of each worker.
            memories: bytes of each device by group of settings, as ``cluster.devices.memories`` gives them. A
                draft on the target's device has the bytes of that device.

        Raises:
            CacheTooSmallError: the memory of a cache holds no block.
            UnsupportedModelError: a model cannot be served.
        """
        target = settings.target
        assert target.gpus is not None
        self._settings = settings
        self._memories = memories
        engine, gpus = settings.target_engine(), target.gpus
        per_device = _per_device(target.most_replicas * target.tensor_parallel, gpus)
        memory = memories["target"]
        self.target = _part("target", "target", skeleton(engine), engine, gpus, memory, per_device)
        self._alone = Device(memory, target, per_device * gpus, (self.target,))
        self.devices = [self._alone]
        for name, draft in settings.drafts.items():
            self.devices = self._with(self.devices, name, draft, skeleton(settings.draft_engine(name)))

    @property
    def settings(self) -> Settings:
        """Settings in which open sizes of caches are filled in, in bytes."""
        parts = {part.group: part for device in self.devices for part in device.parts}
        caches = {group: {"cache_memory": part.engine.cache_memory} for group, part in parts.items()}
        drafts = {name: caches[f"drafts.{name}"] for name in self._settings.drafts}
        return self._settings.changed(target=caches["target"], drafts=drafts)

    def drafting(self, model: ModelSkeleton, quantization: Quantization | None = None) -> Device:
        """Returns the first draft's device with another model in its place, without the other drafts."""
        target = self._settings.target
        assert target.gpus is not None
        usual = {DEFAULT_DRAFT: DraftSettings(model=target.model, gpus=min(target.gpus, 1.0))}
        name, draft = next(iter((self._settings.drafts or usual).items()))
        other = draft.model_copy(update={"model": model.name, "quantization": quantization})
        return self._with([self._alone], name, other, model)[-1]

    def _with(
        self, devices: list[Device], name: str, draft: DraftSettings, model: ModelSkeleton
    ) -> list[Device]:
        """Puts the draft on the first device that takes it, or on another device."""
        assert draft.gpus is not None
        index = next((index for index, device in enumerate(devices) if device.takes(draft)), len(devices))
        group = f"drafts.{name}"
        place = [*devices, Device(self._memories[group], draft, 0.0, ())][index]
        drafts = {**self._settings.drafts, name: draft}
        engine = self._settings.model_copy(update={"drafts": drafts}).draft_engine(name)
        per_device = _per_device(draft.most_replicas, draft.gpus)
        part = _part("draft", group, model, engine, draft.gpus, place.memory, per_device, depth=0)
        return [*devices[:index], place.with_part(draft, part), *devices[index + 1 :]]

    def other_drafts(self) -> Iterator[tuple[str, Device]]:
        """Yields the name of each model that could draft instead, and its device."""
        target = self.target.plan
        type_name = str(target.dtype).removeprefix("torch.")
        for name, shape in LLAMAS.items():
            sizes = {"vocab_size": target.vocab_size, "max_position_embeddings": target.context_length}
            model = ModelSkeleton(LlamaConfig(**shape, **sizes), name, target.dtype)
            yield f"{name} {type_name}", self.drafting(model)
            yield f"{name} int4", self.drafting(model, "int4")
        yield "the target in int4", self.drafting(skeleton(self._settings.target_engine()), "int4")

    def check(self) -> None:
        """Raises ValueError if a part does not fit; the message names a value that would fit."""
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
    engine = on_device(engine, gpus)
    allowed = memory
    if engine.cache_memory is None:
        # Without room for a cache, one block is planned; the check of the total then refuses the plan.
        block = block_bytes(engine, model.layers_of(engine.tensor_parallel), model.dtype)
        cache = max(default_cache(model, engine, memory, depth), block)
        engine = engine.model_copy(update={"cache_memory": cache})
        allowed = int(engine.device_share * memory) if gpus else memory

    def plan(changed: EngineSettings) -> MemoryPlan:
        return plan_memory(model, changed, memory, depth)

    def costs() -> StepCosts:
        return step_costs(model, engine, on_cuda=gpus > 0)

    promise = model.promise(engine).sentence
    return Part(role, group, plan(engine), per_device, engine, allowed, plan, costs, promise)


def _refusal(part: Part, memory: int, before: int) -> str:
    """Returns the reason of a refusal.

    before: bytes that other parts hold on the device.
    """
    plan = part.plan
    uses = ("weights", "cache", "activations", "graphs", "runtime")
    needs = ", ".join(f"{use} {getattr(plan, use) / GB:.2f}" for use in uses)
    others = f" next to {before / GB:.2f} GB of others" if before else ""
    reason = (
        f"{part.title}={plan.model!r} takes {part.taken / GB:.2f} GB ({part.per_device} times {needs}) of a "
        f"device with {memory / GB:.2f} GB{others}"
    )
    room = (memory - before) // part.per_device
    options = []
    if cache := part.largest_cache(room):
        options.append(f"{part.group}.cache_memory={cache}")
    sequences = part.largest_step(room)
    if sequences and sequences < part.engine.max_sequences:  # else the cache alone is too large
        options.append(f"{part.group}.max_sequences={sequences}")
    if options:
        return f"{reason}: {' or '.join(options)} would fit"
    others = "another draft" if part.role == "draft" else "more target.tensor_parallel, another target"
    return f"{reason}: {others} or a larger device may fit"


def _per_device(replicas: int, gpus: float) -> int:
    """Returns the replicas of one role on one device, as Ray packs them; without GPUs, on the machine."""
    if gpus == 0:
        return replicas
    return min(replicas, math.floor(1 / gpus)) if gpus < 1 else 1
