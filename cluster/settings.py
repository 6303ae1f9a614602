"""Everything that can be set about a deployment, in one place."""

import json
import math
import os
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.settings import GatewaySettings
from outrider.drafters.name import DrafterName
from outrider.engine.settings import EngineSettings, Quantization
from outrider.pace.settings import PaceSettings

DEMO_NAME = "outrider-demo"
TARGET_ITSELF = "target"  # as a draft


def _from_json(value: Any) -> Any:
    """The command line has only text."""
    return json.loads(value) if isinstance(value, str) else value


Pace = Annotated[PaceSettings, BeforeValidator(_from_json)]
Resources = Annotated[dict[str, float], BeforeValidator(_from_json)]


class Settings(BaseModel):
    """``serve run cluster.app target=... draft=...``: each field is an argument, others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str | None = Field(
        default=None,
        description="YAML file with these settings, or a folder of such *.yaml, each setting in one of them; "
        "arguments win",
    )
    target: str | None = Field(default=None, description="local folder or hub id; None: the demo pair")
    draft: str | None = Field(
        default=None,
        description="the same for the draft; None and a target: no draft; target: the target's own copy, in 4"
        " bit if draft_quantization does not say otherwise",
    )
    name: str | None = Field(default=None, description="what clients call the target; None: as `target`")
    pace: Pace = Field(
        default=PaceSettings(), description="how deep to draft; JSON; may change while the service runs"
    )
    drafter: DrafterName | None = Field(
        default=None, description="None: model if there is a draft, else ngram"
    )
    draft_deadline_ms: float = Field(
        default=1000.0, gt=0.0, description="longest wait for a Draft, milliseconds"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="auto: the checkpoint's; None: float32 for the demo, else auto",
    )
    target_quantization: Quantization | None = Field(
        default=None, description="of its weights at load; None: as the checkpoint has them"
    )
    draft_quantization: Quantization | None = Field(
        default=None, description="the same of the draft; never changes the text"
    )
    batch_invariant: bool = Field(
        default=False,
        description="the target's logits do not depend on what else is in its step: same seed, same text in"
        " any dtype, for some speed",
    )
    self_check: bool = Field(
        default=True,
        description="at load: compare what a model computes here with what transformers computes, and refuse"
        " it where they differ",
    )
    draft_ahead: int = Field(
        default=12, ge=0, description="verdicts that a draft worker prepares for in idle time; 0: none"
    )
    shortest_draft_step_ms: float = Field(
        default=0.0, ge=0.0, description="that a step of the draft is held to take; for benchmarks"
    )
    cache_memory: int | float | None = Field(
        default=None,
        gt=0.0,
        description="of each worker and rank: bytes, or a share of the memory below 1; None: on a GPU what is"
        " left of its part, on a CPU what max_sequences of the context need, up to a fifth of the machine",
    )
    draft_cache_memory: int | float | None = Field(
        default=None, gt=0.0, description="the same of each draft worker; None: as cache_memory"
    )
    max_sequences: int = Field(
        default=256, ge=1, description="in one step of a worker: what the logits of a step may take"
    )

    gateways: int = Field(default=1, ge=1, description="replicas")
    targets: int = Field(default=1, ge=1, description="replicas")
    drafts: int = Field(default=1, ge=1, description="replicas")
    max_targets: int | None = Field(
        default=None,
        ge=1,
        description="replicas up to which targets are added under load; None: a fixed number",
    )
    max_drafts: int | None = Field(default=None, ge=1, description="the same of drafts")
    sequences_per_target: int = Field(
        default=32, ge=1, description="open ones that autoscaling aims at for each target"
    )
    sequences_per_draft: int = Field(default=64, ge=1, description="the same for each draft worker")
    cache_in_use: float = Field(
        default=0.8, gt=0.0, le=1.0, description="share of the cache's blocks that autoscaling aims at"
    )
    scale_up_delay_s: float = Field(
        default=30.0, ge=0.0, description="for which more replicas must be wanted before there are more"
    )
    scale_down_delay_s: float = Field(default=300.0, ge=0.0, description="the same for fewer")
    tensor_parallel: int = Field(default=1, ge=1, description="devices of one target")
    target_placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="STRICT_PACK", description="of its ranks, as Ray names it: all on one node, or spread"
    )
    load_timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="seconds after which a worker's load has hung and it is replaced: for all its ranks, "
        "downloads included",
    )
    step_timeout_s: float = Field(
        default=30.0, gt=0.0, description="seconds after which a worker's step has hung and it is replaced"
    )
    target_threads: int | None = Field(
        default=None, ge=1, description="per rank, on a CPU; None: all cores but one, shared by the ranks"
    )
    draft_threads: int = Field(default=1, ge=1, description="on a CPU")
    target_gpus: float | None = Field(default=None, ge=0.0, description="per rank; None: a share of all")
    draft_gpus: float | None = Field(default=None, ge=0.0, description="per replica; None: a share of all")
    target_accelerator: str | None = Field(default=None, description="as Ray names it: H100, L4, ...")
    draft_accelerator: str | None = Field(default=None, description="as Ray names it")
    gateway_resources: Resources = Field(default_factory=dict, description="of Ray, per replica; JSON")
    target_resources: Resources = Field(default_factory=dict, description="of Ray, per rank; JSON")
    draft_resources: Resources = Field(default_factory=dict, description="of Ray, per replica; JSON")
    nodes_join_within_s: float = Field(
        default=0.0,
        ge=0.0,
        description="seconds that nodes with the resources of the replicas may take to join a cluster; "
        "after that a start without them is refused",
    )

    http_host: str = Field(default="127.0.0.1", description="address that the HTTP proxy listens on")
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=9000, ge=1, le=65535)
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="of Ray's exporter, where Ray is started here; None: a free one, printed at start",
    )
    max_requests: int = Field(default=256, ge=1, description="requests at a time per gateway")
    max_waiting: int = Field(default=256, ge=0, description="requests in a gateway's queue, others get 429")
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="None: the target's context")
    max_output_tokens: int | None = Field(default=None, ge=1, description="None: the target's context")
    max_choices: int = Field(default=16, ge=1, description="answers to one request")
    max_message_bytes: int = Field(default=4 * 2**20, ge=1, description="of one request")
    request_deadline_s: float = Field(default=600.0, gt=0.0, description="from arrival to the last token")
    max_losses: int = Field(
        default=3, ge=1, description="targets lost with a request, no token in between, before it fails"
    )

    trace_texts: bool = Field(default=False, description="put prompts and answers into the traces")
    api_keys_file: str | None = Field(
        default=None, description="one API key a line; see OUTRIDER_API_KEYS too"
    )
    allow_anonymous: bool = Field(
        default=False, description="answer callers from other machines though there are no API keys"
    )
    tls_certificate: str | None = Field(
        default=None, description="PEM file, for the name outrider: between gateways and workers"
    )
    tls_key: str | None = Field(default=None, description="PEM file")
    tls_authority: str | None = Field(default=None, description="PEM file that signs tls_certificate")

    @model_validator(mode="after")
    def _ranks_have_whole_devices(self) -> "Settings":
        if self.tensor_parallel > 1 and self.target_gpus is not None and self.target_gpus not in (0.0, 1.0):
            raise ValueError(
                f"target_gpus={self.target_gpus:g} with tensor_parallel={self.tensor_parallel}: give each "
                "rank 1, or 0 for the CPU"
            )
        return self

    @model_validator(mode="after")
    def _limits_hold(self) -> "Settings":
        for least, most in (("targets", "max_targets"), ("drafts", "max_drafts")):
            if getattr(self, most) is not None and getattr(self, most) < getattr(self, least):
                raise ValueError(f"{most}={getattr(self, most)} is below {least}={getattr(self, least)}")
        return self

    @property
    def most_targets(self) -> int:
        """Replicas that there may be."""
        return self.max_targets or self.targets

    @property
    def most_drafts(self) -> int:
        """The same of drafts, if there are any."""
        return self.max_drafts or self.drafts

    def resolved(self) -> "Settings":
        """With nothing left open that depends on a file, on this machine or on another field.

        Raises:
            ValueError: the config file cannot be read, or holds what is not accepted; or settings contradict
                one another.
        """
        if self.config is not None:
            return _from_file(
                self.config, self.model_dump(include=self.model_fields_set - {"config"})
            ).resolved()
        is_demo = self.target is None
        target = self.target or _demo("target")
        draft = self.draft or (_demo("draft") if is_demo else None)
        draft_quantization = self.draft_quantization
        if draft == TARGET_ITSELF:
            draft, draft_quantization = target, draft_quantization or "int4"
        if draft is None and draft_quantization is not None:
            raise ValueError(
                f"draft_quantization={draft_quantization!r} needs a draft: name one, or draft=target"
            )
        return self.model_copy(
            update={
                "target": target,
                "draft": draft,
                "draft_quantization": draft_quantization,
                "name": self.name or (DEMO_NAME if is_demo else target),
                "drafter": self.drafter or ("model" if draft else "ngram"),
                "dtype": self.dtype or ("float32" if is_demo else "auto"),
                "target_threads": self.target_threads
                or max(1, ((os.cpu_count() or 1) - 1) // self.tensor_parallel),
            }
        )

    def with_gpus(self, gpus: float) -> "Settings":
        """What was left open shares the cluster's ``gpus``: one per replica, or as equal parts as pack.

        The ranks of one target have a GPU each in any case, and drafts what they leave.
        """
        drafts = self.most_drafts if self.draft is not None else 0
        if self.tensor_parallel == 1:
            share = _share(self.most_targets + drafts, gpus)
            shares = {"target_gpus": share, "draft_gpus": share}
        else:
            of_rank = (1.0 if gpus >= 1 else 0.0) if self.target_gpus is None else self.target_gpus
            left = gpus - self.most_targets * self.tensor_parallel * of_rank
            shares = {"target_gpus": of_rank, "draft_gpus": _share(drafts, left)}
        return self.model_copy(update={k: v for k, v in shares.items() if getattr(self, k) is None})

    def gateway(self) -> GatewaySettings:
        """Without API keys, which are no setting."""
        shared = GatewaySettings.model_fields.keys() & Settings.model_fields.keys()
        own = {"model": self.name, "tokenizer": self.target, "max_running": self.max_requests}
        return GatewaySettings.model_validate({**self.model_dump(include=shared), **own})

    def target_engine(self) -> EngineSettings:
        return self._engine(
            model=self.target,
            threads=self.target_threads,
            cache_memory=self.cache_memory,
            tensor_parallel=self.tensor_parallel,
            quantization=self.target_quantization,
            batch_invariant=self.batch_invariant,
            device_share=self._device_share(self.target_gpus),
        )

    def draft_engine(self) -> EngineSettings:
        return self._engine(
            model=self.draft,
            threads=self.draft_threads,
            cache_memory=self.draft_cache_memory or self.cache_memory,
            quantization=self.draft_quantization,
            branches=self.draft_ahead,
            device_share=self._device_share(self.draft_gpus),
            shortest_step_s=self.shortest_draft_step_ms / 1e3,
        )

    def _device_share(self, gpus: float | None) -> float:
        """A worker's part of a GPU; without one, of a machine on which all such workers may be."""
        if gpus:
            return min(gpus, 1.0)
        on_cpus = 0 if self.target_gpus else self.most_targets * self.tensor_parallel
        if self.draft is not None and not self.draft_gpus:
            on_cpus += self.most_drafts
        return 1.0 / max(on_cpus, 1)

    def _engine(self, **fields: str | float | bool | None) -> EngineSettings:
        shared = {"dtype", "self_check", "load_timeout_s", "step_timeout_s"}
        return EngineSettings.model_validate(
            {**fields, **self.model_dump(include=shared), "max_running": self.max_sequences}
        )


def _share(replicas: int, gpus: float) -> float:
    return 1.0 / math.ceil(replicas / gpus) if replicas and gpus >= 1 else 0.0


def _from_file(path: str, arguments: dict[str, Any]) -> Settings:
    place = Path(path)
    files = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    if not files:
        raise ValueError(f"config={path!r} is a folder without *.yaml files: put settings into one")
    fields: dict[str, Any] = {}
    for file in files:
        given = _read(file)
        if twice := sorted(fields.keys() & given.keys()):
            raise ValueError(f"{file} sets {', '.join(twice)} again: keep each setting in one file of {path}")
        fields |= given
    return Settings.model_validate({**fields, **arguments})


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"config={str(file)!r} cannot be read: {error}") from error
    if not isinstance(fields, dict) or "config" in fields:
        raise ValueError(f"config={str(file)!r} must hold settings by name, and no other config")
    return fields


def _demo(role: str) -> str:
    return str(files("outrider.demo").joinpath("pair", role))
