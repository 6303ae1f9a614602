"""All settings of a deployment: a group for each of its parts."""

import math
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, model_validator

from gateway.roster import BY_TASK, Roster
from gateway.settings import CallerSettings, GatewaySettings, RequestSettings
from outrider.drafters.registry import drafters as rows
from outrider.engine.settings import DraftModelSettings, EngineSettings, ModelSettings, TargetModelSettings
from outrider.pace.settings import PaceSettings

DEMO_NAME = "outrider-demo"
DEMO_PARALLEL = "outrider-demo-parallel"  # model of a draft: the demo draft trained for parallel drafting
TARGET_ITSELF = "target"  # model of a draft: the target's own copy
DEFAULT_DRAFT = "model"  # name of the draft that ``draft=MODEL`` gives

RAYS_GRAINS = 10_000  # grains of one GPU, in which Ray counts parts of a resource
ROUNDING = 1e-6  # grains that a float may be off

DraftName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
SequencesPerReplica = Annotated[
    int, Field(ge=1, description="open sequences per replica that autoscaling aims at")
]


class Group(BaseModel):
    """Base of a group of settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaSettings(Group):
    """Settings of replicas: their number, and their place."""

    replicas: int = Field(default=1, ge=1, description="first and least number of replicas")
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="further resources of Ray, by name: per replica, or per rank of a target; JSON",
    )


class WorkerSettings(ReplicaSettings):
    """Settings of replicas that hold a model."""

    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="most replicas under load; None: a fixed number",
    )
    sequences_per_replica: SequencesPerReplica = 32
    gpus: float | None = Field(
        default=None,
        ge=0.0,
        description="GPUs per replica, or per rank of a target: at most 1; None: a share of all",
    )
    accelerator: str | None = Field(default=None, description="type of GPU as Ray names it: H100, L4, ...")

    @model_validator(mode="after")
    def _limits_hold(self) -> "WorkerSettings":
        if self.most_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}")
        return self

    @property
    def most_replicas(self) -> int:
        """Most replicas that there may be."""
        return self.max_replicas or self.replicas


class TargetSettings(TargetModelSettings, WorkerSettings):
    """Settings of the target: its model and its workers."""

    name: str = Field(min_length=1, description="name for clients; unless it is given: as `model`")
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="STRICT_PACK",
        description="placement of its ranks, as Ray names it: all on one node, or spread",
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
    def _a_process_has_one_gpu(self) -> "TargetSettings":
        ranks = self.tensor_parallel
        if self.gpus is None or self.gpus == 0.0:
            return self
        if ranks == 1 and self.gpus > 1:
            several = f"tensor_parallel={self.gpus:g} gpus=1 or " if self.gpus.is_integer() else ""
            raise ValueError(
                f"gpus={self.gpus:g} with tensor_parallel=1: a process uses one GPU; give {several}at most 1"
            )
        if ranks > 1 and not 0.5 < self.gpus <= 1.0:  # two ranks of a group cannot share a GPU
            raise ValueError(
                f"gpus={self.gpus:g} with tensor_parallel={ranks}: give each rank 1, above 0.5 to leave the"
                " rest of its GPU to drafts, or 0 for the CPU"
            )
        return self


class DraftSettings(DraftModelSettings, WorkerSettings):
    """A draft: its model and its workers. Model ``target`` is the target's own copy, in 4 bit if nothing else
    is said."""

    sequences_per_replica: SequencesPerReplica = 64

    @model_validator(mode="after")
    def _a_process_has_one_gpu(self) -> "DraftSettings":
        if self.gpus is not None and self.gpus > 1:
            raise ValueError(f"gpus={self.gpus:g}: a draft uses one GPU; give at most 1, or more replicas")
        return self


class GatewayReplicas(RequestSettings, ReplicaSettings):
    """Settings of the gateways: their number, and their work with requests."""

    stop_within_s: float = Field(
        default=15.0,
        ge=0.0,
        description="seconds for running answers to end when `serve run` is told to stop; after them"
        " they end with an error",
    )


class AddressSettings(Group):
    """Settings of the addresses at which callers find the service."""

    http_host: str = Field(default="127.0.0.1", description="address that the HTTP proxy listens on")
    http_port: Port = Field(default=8000, description="port of the OpenAI API and of the page")
    grpc_port: Port = Field(default=9000, description="port of the gRPC API")
    direct_grpc_port: Port | None = Field(
        default=None,
        description="port at which each gateway serves the gRPC API itself, without Serve's proxy in between,"
        " which is faster; on http_host. None: no such port",
    )


class AccessSettings(CallerSettings):
    """Settings of callers' access. OUTRIDER_API_KEYS in the environment holds keys too."""

    api_keys_file: str | None = Field(default=None, description="file with one API key a line")
    require_keys: bool | None = Field(
        default=None,
        description="refuse to start without API keys; None: if a config file of Serve has the settings,"
        " since the environment of `serve run` does not reach those",
    )


class TlsSettings(Group):
    """Settings of certificates between gateways and workers: all three, or none."""

    certificate: str | None = Field(
        default=None, description="PEM file of the certificate, for the name outrider"
    )
    key: str | None = Field(default=None, description="PEM file of its key")
    authority: str | None = Field(
        default=None, description="PEM file of the authority that signs the certificate"
    )


class AutoscalingSettings(Group):
    """Settings of autoscaling: when a worker gets more replicas, or fewer."""

    cache_in_use: float = Field(
        default=0.8, gt=0.0, le=1.0, description="share of the cache's blocks in use that autoscaling aims at"
    )
    up_delay_s: float = Field(
        default=30.0, ge=0.0, description="seconds for which more replicas must be wanted before they start"
    )
    down_delay_s: float = Field(
        default=300.0, ge=0.0, description="seconds for which fewer replicas must be wanted before some stop"
    )


class RaySettings(Group):
    """Settings of the Ray cluster."""

    nodes_join_within_s: float = Field(
        default=0.0,
        ge=0.0,
        description="seconds that nodes with the resources of the replicas may take to join a cluster; "
        "after that a start without them is refused",
    )
    metrics_port: Port | None = Field(
        default=None,
        description="port of Ray's exporter, if Ray is started here; None: a free port, printed at start",
    )


class Settings(Group):
    """Settings of one deployment. Open settings that follow from others are filled in.

    Without a target they are the demo pair's; a head that ``target.drafter`` names replaces its draft."""

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
        """Fills in what follows from other settings. A value of a wrong type stays, and is refused later."""
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
        """Returns settings with other values in fields of the target, and of the drafts by name."""
        others = {name: draft.model_copy(update=drafts.get(name, {})) for name, draft in self.drafts.items()}
        return self.model_copy(update={"target": self.target.model_copy(update=target), "drafts": others})

    def with_parallel_drafts(self, names: Iterable[str]) -> "Settings":
        """Returns settings in which these drafts make a Draft in one pass, which is another drafter."""
        other = self.model_copy()
        other._parallel = frozenset(names)
        return other

    def with_gpus(self, gpus: float) -> "Settings":
        """Returns settings in which workers without ``gpus`` share the cluster's GPUs.

        Target and drafts get one GPU per replica, or equal parts that pack. Where the target's part is given,
        or it has ranks, which take a GPU each, drafts get what it leaves.

        Raises:
            ValueError: the target is on GPUs and leaves none for a draft whose part was left open.
        """
        target = self.target
        open_drafts = [name for name, draft in self.drafts.items() if draft.gpus is None]
        drafts = sum(draft.most_replicas for draft in self.drafts.values())
        if target.gpus is None and target.tensor_parallel == 1:
            of_target = of_draft = _share(target.most_replicas + drafts, gpus)
        else:
            of_target = (1.0 if gpus >= 1 else 0.0) if target.gpus is None else target.gpus
            of_draft = _left(target.most_replicas * target.tensor_parallel, of_target, drafts, gpus)
        if of_target and not of_draft and open_drafts:
            raise ValueError(self._none_left(of_target, open_drafts[0], gpus))
        return self.changed(
            target={} if target.gpus is not None else {"gpus": of_target},
            drafts={name: {"gpus": of_draft} for name in open_drafts},
        )

    def _none_left(self, of_target: float, draft: str, gpus: float) -> str:
        """Returns the refusal of a draft on a CPU while its target is on GPUs, and what would be accepted.

        A step of such a draft takes longer than one of the target, so it would never pay; silently it would
        only take the machine's memory and processor.
        """
        target = self.target
        processes = target.most_replicas * target.tensor_parallel
        return (
            f"drafts.{draft}.gpus is left open, and target.tensor_parallel={target.tensor_parallel} with "
            f"target.gpus={of_target:g} takes {processes * of_target:g} of the cluster's {gpus:g} GPUs: give"
            " fewer target.tensor_parallel or one GPU more; target.gpus=0.9, with which drafts share a GPU of"
            f" the target; no draft; or drafts.{draft}.gpus=0 for a draft on the CPU, which hardly ever pays"
        )

    def gateway_settings(self) -> GatewaySettings:
        """Settings of the gateways, without API keys, which are no setting."""
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
        """Returns settings of the target's engine; its worker resolves ``threads`` from its node's cores."""
        return self._engine(self.target, self.target.threads, self.target.gpus)

    def draft_engine(self, name: str) -> EngineSettings:
        """Returns settings of the engine of the draft with that name."""
        draft = self.drafts[name]
        return self._engine(draft, draft.threads or 1, draft.gpus)

    def _engine(self, model: ModelSettings, threads: int | None, gpus: float | None) -> EngineSettings:
        fields = model.model_dump(include=set(EngineSettings.model_fields))
        return EngineSettings.model_validate(
            {**fields, "threads": threads, "device_share": self._device_share(gpus)}
        )

    def _device_share(self, gpus: float | None) -> float:
        """Returns a worker's share of a GPU; without GPUs, of a machine on which all such workers may be."""
        if gpus:
            return min(gpus, 1.0)
        on_cpus = 0 if self.target.gpus else self.target.most_replicas * self.target.tensor_parallel
        on_cpus += sum(draft.most_replicas for draft in self.drafts.values() if not draft.gpus)
        return 1.0 / max(on_cpus, 1)


def on_device(engine: EngineSettings, gpus: float) -> EngineSettings:
    """Returns settings of an engine as a worker with this number of GPUs has them: the CPU without GPUs.

    Ray leaves a worker without GPUs all those of its node to see, so an engine left to choose would take the
    first.
    """
    return engine.model_copy(update={"device": "cuda" if gpus else "cpu"})


def _draft_filled_in(given: Any, target: dict[str, Any], is_demo: bool) -> Any:
    given = {} if given is None else given  # YAML gives None for a draft without settings
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


def _left(processes: int, of_each: float, drafts: int, gpus: float) -> float:
    """Returns the share of a GPU for each draft, next to the target's processes; 0.0: none is left.

    Args:
        processes: ranks of all replicas.
        of_each: GPUs of each process, at most 1.
        drafts: replicas.
        gpus: of the cluster.
    """
    if not drafts or not of_each:
        return _share(drafts, gpus)
    together = math.floor(1 / of_each)  # processes on one GPU
    taken = math.ceil(processes / together)
    if gpus - taken >= 1:
        return _share(drafts, gpus - taken)
    if taken > gpus:
        return 0.0
    on_last = processes - (taken - 1) * together
    next_to_each = (1 - min(together, processes) * of_each) / math.ceil(drafts / taken)
    part = max(next_to_each, (1 - on_last * of_each) / drafts)
    return math.floor(part * RAYS_GRAINS + ROUNDING) / RAYS_GRAINS


def _demo(*path: str) -> str:
    return str(files("outrider.demo").joinpath(*path))


def _demo_head(drafter: Any) -> str | None:
    """Returns the checkpoint of the demo target's drafter with that name; None: it has none."""
    folder = _demo("drafters", str(drafter))
    return folder if os.path.isdir(folder) else None
