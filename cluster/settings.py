"""Everything that can be set about a deployment, in one place: a group of settings for each of its parts."""

import math
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, model_validator

from gateway.drafters.roster import BY_TASK, Roster
from gateway.settings import CallerSettings, GatewaySettings, RequestSettings
from outrider.drafters.registry import drafters as rows
from outrider.engine.settings import DraftModelSettings, EngineSettings, ModelSettings, TargetModelSettings
from outrider.pace.settings import PaceSettings

DEMO_NAME = "outrider-demo"
DEMO_PARALLEL = "outrider-demo-parallel"  # as a draft's model: the demo draft trained for parallel drafting
TARGET_ITSELF = "target"  # as a draft's model
DEFAULT_DRAFT = "model"  # name of the draft that ``draft=MODEL`` gives

DraftName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
SequencesPerReplica = Annotated[
    int, Field(ge=1, description="open ones that autoscaling aims at for each replica")
]


class Group(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaSettings(Group):
    """How many there are of something, and where."""

    replicas: int = Field(default=1, ge=1, description="replicas, to begin with and at least")
    resources: dict[str, float] = Field(
        default_factory=dict, description="of Ray, by name: per replica, of a target per rank; JSON"
    )


class WorkerSettings(ReplicaSettings):
    """The same of those that hold a model."""

    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="replicas up to which more are added under load; None: a fixed number",
    )
    sequences_per_replica: SequencesPerReplica = 32
    gpus: float | None = Field(
        default=None, ge=0.0, description="GPUs per replica, of a target per rank; None: a share of all"
    )
    accelerator: str | None = Field(default=None, description="type of GPU as Ray names it: H100, L4, ...")

    @model_validator(mode="after")
    def _limits_hold(self) -> "WorkerSettings":
        if self.most_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}")
        return self

    @property
    def most_replicas(self) -> int:
        """That there may be."""
        return self.max_replicas or self.replicas


class TargetSettings(TargetModelSettings, WorkerSettings):
    """The target: its model and its workers."""

    name: str = Field(min_length=1, description="what clients call it; unless it is given: as `model`")
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="STRICT_PACK", description="of its ranks, as Ray names it: all on one node, or spread"
    )

    @model_validator(mode="after")
    def _head_has_a_drafter(self) -> "TargetSettings":
        if self.head is not None and self.drafter is None:
            raise ValueError(f"head={self.head!r} is a drafter's: name that as drafter, eagle3 or medusa")
        return self

    @model_validator(mode="after")
    def _layers_have_a_drafter(self) -> "TargetSettings":
        for name in ("early_exit", "skipped_layers"):
            if name in self.model_fields_set and self.drafter != "early_exit":
                value = getattr(self, name)
                raise ValueError(f"{name}={value!r} is for drafter=early_exit, and drafter={self.drafter!r}")
        return self

    @model_validator(mode="after")
    def _ranks_have_whole_devices(self) -> "TargetSettings":
        if self.tensor_parallel > 1 and self.gpus not in (None, 0.0, 1.0):
            raise ValueError(
                f"gpus={self.gpus:g} with tensor_parallel={self.tensor_parallel}: give each rank 1, or 0 for "
                "the CPU"
            )
        return self


class DraftSettings(DraftModelSettings, WorkerSettings):
    """A draft: its model and its workers. Model ``target`` is the target's own copy, in 4 bit if nothing else
    is said."""

    sequences_per_replica: SequencesPerReplica = 64


class GatewayReplicas(RequestSettings, ReplicaSettings):
    """The gateways: how many, and what each does with requests."""


class AddressSettings(Group):
    """Where callers find the service."""

    http_host: str = Field(default="127.0.0.1", description="address that the HTTP proxy listens on")
    http_port: Port = Field(default=8000, description="port of the OpenAI API and of the page")
    grpc_port: Port = Field(default=9000, description="port of the gRPC API")
    direct_grpc_port: Port | None = Field(
        default=None,
        description="port at which each gateway answers the same by itself, without Serve's proxy in between,"
        " which is faster; on http_host. None: it does not",
    )


class AccessSettings(CallerSettings):
    """Which callers are answered. OUTRIDER_API_KEYS in the environment holds keys too."""

    api_keys_file: str | None = Field(default=None, description="file with one API key a line")


class TlsSettings(Group):
    """Certificates between gateways and workers: all three, or none."""

    certificate: str | None = Field(default=None, description="PEM file, for the name outrider")
    key: str | None = Field(default=None, description="PEM file")
    authority: str | None = Field(default=None, description="PEM file that signs the certificate")


class AutoscalingSettings(Group):
    """When there are more replicas of a worker, or fewer."""

    cache_in_use: float = Field(
        default=0.8, gt=0.0, le=1.0, description="share of the cache's blocks that is aimed at"
    )
    up_delay_s: float = Field(
        default=30.0, ge=0.0, description="seconds for which more must be wanted before there are more"
    )
    down_delay_s: float = Field(default=300.0, ge=0.0, description="the same for fewer")


class RaySettings(Group):
    """The cluster below."""

    nodes_join_within_s: float = Field(
        default=0.0,
        ge=0.0,
        description="seconds that nodes with the resources of the replicas may take to join a cluster; "
        "after that a start without them is refused",
    )
    metrics_port: Port | None = Field(
        default=None,
        description="of Ray's exporter, where Ray is started here; None: a free one, printed at start",
    )


class Settings(Group):
    """Of one deployment. What follows from others is filled in; without a target it is the demo pair's, where
    a head that ``target.drafter`` names takes the draft's place."""

    target: TargetSettings
    drafts: dict[DraftName, DraftSettings] = Field(
        default_factory=dict,
        description="drafts by the names under which they draft; each has workers of its own",
    )
    gateway: GatewayReplicas = GatewayReplicas()
    pace: PaceSettings = PaceSettings()
    addresses: AddressSettings = AddressSettings()
    access: AccessSettings = AccessSettings()
    tls: TlsSettings = TlsSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    ray: RaySettings = RaySettings()
    _parallel: frozenset[str] = PrivateAttr(
        default=frozenset()
    )  # drafts whose checkpoints are trained for it

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What is of the wrong type is left as it is, and refused later."""
        target = given.get("target", {})
        if not isinstance(target, dict):
            return given
        is_demo = "model" not in target
        if is_demo:
            head = _demo_head(target.get("drafter"))
            demo = {"model": _demo("pair", "target"), "name": DEMO_NAME, "dtype": "float32"}
            target = {**demo, **({} if head is None else {"head": head}), **target}
        has_demo_draft = is_demo and target.get("drafter") is None
        drafts = given.get("drafts") or ({DEFAULT_DRAFT: {}} if has_demo_draft else {})
        if isinstance(drafts, dict):
            drafts = {name: _draft_filled_in(draft, target, is_demo) for name, draft in drafts.items()}
        gateway = given.get("gateway", {})
        if isinstance(gateway, dict):
            there = [*filter(None, [target.get("drafter")]), *drafts]
            gateway = {"drafters": there or ["ngram"], **gateway}
        return {**given, "target": {"name": target["model"], **target}, "drafts": drafts, "gateway": gateway}

    @model_validator(mode="after")
    def _drafters_are_there(self) -> "Settings":
        taken = {BY_TASK, *(row.name for row in rows())} - {DEFAULT_DRAFT}
        if wrong := next((name for name in self.drafts if name in taken), None):
            raise ValueError(f"drafts.{wrong} has the name of something else: give the draft another")
        for name in self.gateway.drafters:
            try:
                self._roster.find(name)
            except ValueError as error:
                raise ValueError(f"gateway.drafters={self.gateway.drafters}: {error}") from None
        return self

    @property
    def _roster(self) -> Roster:
        return Roster(self._kinds, self.target.drafter)

    @property
    def _kinds(self) -> dict[str, str]:
        """Rows of the registry by the names of the drafts."""
        return {name: "parallel" if name in self._parallel else "model" for name in self.drafts}

    def changed(self, *, target: Mapping[str, Any], drafts: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """With other values in fields of the target, and of the drafts by their names."""
        others = {name: draft.model_copy(update=drafts.get(name, {})) for name, draft in self.drafts.items()}
        return self.model_copy(update={"target": self.target.model_copy(update=target), "drafts": others})

    def with_parallel_drafts(self, names: Iterable[str]) -> "Settings":
        """These make a Draft in one pass: that is another drafter, at another cost."""
        other = self.model_copy()
        other._parallel = frozenset(names)
        return other

    def with_gpus(self, gpus: float) -> "Settings":
        """What was left open shares the cluster's ``gpus``: one per replica, or as equal parts as pack.

        The ranks of one target have a GPU each in any case, and drafts what they leave.
        """
        target = self.target
        drafts = sum(draft.most_replicas for draft in self.drafts.values())
        if target.tensor_parallel == 1:
            of_target = of_draft = _share(target.most_replicas + drafts, gpus)
        else:
            of_target = 1.0 if gpus >= 1 else 0.0
            of_rank = of_target if target.gpus is None else target.gpus
            of_draft = _share(drafts, gpus - target.most_replicas * target.tensor_parallel * of_rank)
        return self.changed(
            target={} if target.gpus is not None else {"gpus": of_target},
            drafts={name: {"gpus": of_draft} for name, draft in self.drafts.items() if draft.gpus is None},
        )

    def gateway_settings(self) -> GatewaySettings:
        """Without API keys, which are no setting."""
        requests = self.gateway.model_dump(include=set(RequestSettings.model_fields))
        callers = self.access.model_dump(include=set(CallerSettings.model_fields))
        host, port = self.addresses.http_host, self.addresses.direct_grpc_port
        return GatewaySettings(
            model=self.target.name,
            tokenizer=self.target.model,
            drafts=self._kinds,
            beside_target=self.target.drafter,
            direct_grpc=None if port is None else f"{host}:{port}",
            **requests,
            **callers,
        )

    def target_engine(self) -> EngineSettings:
        cores_left = (os.cpu_count() or 1) - 1
        threads = self.target.threads or max(1, cores_left // self.target.tensor_parallel)
        return self._engine(self.target, threads, self.target.gpus)

    def draft_engine(self, name: str) -> EngineSettings:
        """Of the draft of that name."""
        draft = self.drafts[name]
        return self._engine(draft, draft.threads or 1, draft.gpus)

    def _engine(self, model: ModelSettings, threads: int, gpus: float | None) -> EngineSettings:
        fields = model.model_dump(include=set(EngineSettings.model_fields))
        return EngineSettings.model_validate(
            {**fields, "threads": threads, "device_share": self._device_share(gpus)}
        )

    def _device_share(self, gpus: float | None) -> float:
        """A worker's part of a GPU; without one, of a machine on which all such workers may be."""
        if gpus:
            return min(gpus, 1.0)
        on_cpus = 0 if self.target.gpus else self.target.most_replicas * self.target.tensor_parallel
        on_cpus += sum(draft.most_replicas for draft in self.drafts.values() if not draft.gpus)
        return 1.0 / max(on_cpus, 1)


def _draft_filled_in(given: Any, target: dict[str, Any], is_demo: bool) -> Any:
    given = {} if given is None else given  # as YAML has a draft of which nothing is said
    if not isinstance(given, dict):
        return given
    if given.get("model") == TARGET_ITSELF:
        of_target = {name: value for name, value in target.items() if name in ("model", "dtype")}
        return {"quantization": "int4", **of_target, **given, "model": target["model"]}
    if given.get("model") == DEMO_PARALLEL:
        return {"dtype": "float32", **given, "model": _demo("drafters", "parallel")}
    return {"model": _demo("pair", "draft"), "dtype": "float32", **given} if is_demo else given


def _share(replicas: int, gpus: float) -> float:
    return 1.0 / math.ceil(replicas / gpus) if replicas and gpus >= 1 else 0.0


def _demo(*path: str) -> str:
    return str(files("outrider.demo").joinpath(*path))


def _demo_head(drafter: Any) -> str | None:
    """Of the demo target, where it has one for a drafter of that name."""
    folder = _demo("drafters", str(drafter))
    return folder if os.path.isdir(folder) else None
