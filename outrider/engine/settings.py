"""Settings of an engine."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from outrider.drafters.name import TargetDrafterName, WorkerDrafterName

AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", max_length=128)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Bytes = Annotated[int, Field(ge=1)]
Quantization = Literal["int8", "int4"]
OF_ONE_DRAFTER = {"quantization": "colocated", "layers": "early_exit", "skipped_layers": "early_exit"}
DraftAhead = Annotated[
    Annotated[int, Field(ge=0)] | None,
    Field(
        description="verdicts, of all sequences together, for which a draft prepares in idle time; 0: none;"
        " None: 12, and none on a part of a GPU without NVIDIA's MPS, as it would slow other workers there",
    ),
]


class ModelSettings(BaseModel):
    """Settings of any model, target or draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1, description="local checkpoint folder or hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of weights; auto takes the checkpoint's"
    )
    quantization: Quantization | None = Field(
        default=None,
        description="of the weights at load; None: as the checkpoint has them, which may be quantized",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="threads of one operation on the CPU, for each process; None: for a target all cores of"
        " its node but one, shared by its ranks there, for a draft one, for an engine without a deployment"
        " what torch takes",
    )
    cache_dtype: Literal["auto", "float8_e4m3fn"] = Field(
        default="auto",
        description="type of cached keys and values; auto: that of the weights. float8_e4m3fn holds twice the"
        " tokens of bfloat16. A seeded answer depends on the target's: another type gives another text",
    )
    cache_memory: Bytes | Share | None = Field(
        default=None,
        description="memory for the cache, on each device: bytes, or a share of its memory below 1; None:"
        " what the memory plan leaves of a GPU, or max_sequences of the context take, up to a share",
    )
    max_sequences: int = Field(
        default=256, ge=1, description="sequences in one step: what its logits may take follows from it"
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="prompt tokens in one step, of all sequences together: what decoding sequences wait for"
        " at most; None: 2,048 on a GPU, 512 on a CPU",
    )
    self_check: bool = Field(
        default=True,
        description="at load: compare what the model computes here with what transformers computes, and"
        " refuse it where they differ",
    )
    load_timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="seconds after which a load, of all ranks, downloads included, has hung, and its worker"
        " is replaced",
    )
    step_timeout_s: float = Field(
        default=30.0, gt=0.0, description="seconds after which a step has hung, and its worker is replaced"
    )


class TargetDrafterSettings(BaseModel):
    """Settings of a target drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        description="local folder or hub id of the drafter's checkpoint, if it has one: its heads, its exits,"
        " or the draft model",
    )
    quantization: Quantization | None = Field(
        default=None,
        description="of colocated: quantization of its weights at load; None: the type of the target's"
        " weights",
    )
    layers: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="of early_exit: number of the target's first layers that draft; auto: what pays is"
        " searched on live text",
    )
    skipped_layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="of early_exit: layers, from 0 on, that it leaves out instead; JSON",
    )

    @model_validator(mode="after")
    def _layers_are_said_once(self) -> "TargetDrafterSettings":
        if self.skipped_layers and self.layers != "auto":
            raise ValueError(
                f"skipped_layers={[*self.skipped_layers]} with layers={self.layers}: give one of them"
            )
        return self


class TargetModelSettings(ModelSettings):
    """Settings of a target, beyond those of any model."""

    tensor_parallel: int = Field(
        default=1, ge=1, description="devices that share the model, each with a process of its own"
    )
    batch_invariant: bool = Field(
        default=False,
        description="a token's logits do not depend on what else is in its step, bit for bit, for some"
        " speed; a CPU takes it in float32 and bfloat16",
    )
    drafters: dict[TargetDrafterName, TargetDrafterSettings] = Field(
        default_factory=dict,
        description="target drafters by name: they run in the target's process, and each has own settings",
    )

    adapters: dict[AdapterName, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="LoRA adapters in PEFT's form by the names that requests give as `model`: local folders"
        " or hub ids",
    )
    adapter_folder: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="folder, on every node of the target, whose adapters requests may load and unload while"
        " the service runs; None: they may not",
    )
    max_loaded_adapters: int = Field(
        default=4, ge=1, description="adapters that requests have loaded at a time, at most"
    )
    max_adapter_rank: int = Field(
        default=16, ge=1, description="rank of an adapter that a request loads, at most"
    )

    @field_validator("drafters", mode="before")
    @classmethod
    def _without_settings(cls, given: Any) -> Any:
        """Replaces None, which YAML gives for a drafter without settings, by empty settings."""
        if not isinstance(given, dict):
            return given
        return {name: {} if own is None else own for name, own in given.items()}

    @model_validator(mode="after")
    def _settings_suit_their_drafter(self) -> "TargetModelSettings":
        for name, own in self.drafters.items():
            for field, value in own.model_dump(exclude_defaults=True).items():
                drafter = OF_ONE_DRAFTER.get(field, name)
                if drafter != name:
                    given = f"drafters.{name}.{field}={value!r}"
                    raise ValueError(f"{given}: only drafters.{drafter} has {field}")
        return self

    @property
    def most_adapters(self) -> int:
        """Largest number of adapters that are there at a time, which have the numbers from 1 on."""
        return len(self.adapters) + (0 if self.adapter_folder is None else self.max_loaded_adapters)

    @model_validator(mode="after")
    def _adapters_are_computed(self) -> "TargetModelSettings":
        if not self.most_adapters:
            return self
        given = "adapters" if self.adapters else "adapter_folder"
        if self.batch_invariant:
            raise ValueError(
                f"{given} with batch_invariant=True: the products of a row's adapter depend on the number of"
                " rows that have it; leave one of them out"
            )
        if "early_exit" in self.drafters:
            raise ValueError(
                f"{given} with drafters.early_exit: its layers draft without an adapter into the target's own"
                " cache; take another drafter"
            )
        return self


class DraftModelSettings(ModelSettings):
    """Settings of a draft, beyond those of any model."""

    worker_drafter: WorkerDrafterName | None = Field(
        default=None,
        description="how the model drafts: the name of a drafter of draft workers, or module:NAME of its row."
        " None: parallel if the checkpoint has a pard_token, else model",
    )
    draft_ahead: DraftAhead = None
    shortest_step_s: float = Field(
        default=0.0, ge=0.0, description="seconds that a step is held to take at least; for benchmarks"
    )


class EngineSettings(TargetModelSettings, DraftModelSettings):
    """Settings of an engine: a model on a device or on several. The class serves targets and drafts."""

    draft_ahead: DraftAhead = 0
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto takes the first GPU if there is one",
    )
    device_share: float = Field(
        default=1.0, gt=0.0, le=1.0, description="of each device's memory: the rest is for others on it"
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="tokens per cache block")
    is_draft: bool = Field(
        default=False, description="it makes Drafts: on CUDA their positions are captured as well"
    )
    graphs: bool = Field(
        default=True,
        description="on CUDA: capture the forward passes of decoding and verifying, where attention is paged",
    )
