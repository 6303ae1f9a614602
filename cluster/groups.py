"""Groups of a deployment's settings, one for each of its parts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gateway.settings import CallerSettings, RequestSettings
from outrider.engine.settings import DraftModelSettings, TargetModelSettings

DEFAULT_DRAFT = "model"  # name of the draft that ``draft=MODEL`` gives

DraftName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
SequencesPerReplica = Annotated[
    int, Field(ge=1, description="open sequences per replica that autoscaling aims at")
]


class Group(BaseModel):
    """Base of a group of settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReplicaSettings(Group):
    """Settings of the place of replicas."""

    resources: dict[str, float] = Field(
        default_factory=dict,
        description="further resources of Ray, by name: per replica, or per rank of a target; JSON",
    )


class WorkerSettings(ReplicaSettings):
    """Settings of replicas that hold a model."""

    replicas: int = Field(default=1, ge=1, description="first and least number of replicas")
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
        """Largest number of replicas that there may be."""
        return self.max_replicas or self.replicas


class TargetSettings(TargetModelSettings, WorkerSettings):
    """Settings of the target: its model and its workers."""

    name: str = Field(min_length=1, description="name for clients; unless it is given: as `model`")
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="STRICT_PACK",
        description="placement of its ranks, as Ray names it: all on one node, or spread",
    )

    ttft_target_s: float | None = Field(
        default=None,
        gt=0.0,
        description="seconds to the first token at a target, for nine in ten new sequences, that autoscaling"
        " aims at in place of sequences_per_replica; None: it does not look at them",
    )

    @model_validator(mode="after")
    def _aim_has_room(self) -> "TargetSettings":
        if self.ttft_target_s is not None and self.max_replicas is None:
            raise ValueError(
                f"ttft_target_s={self.ttft_target_s:g} without max_replicas: give that, as a fixed number of"
                " replicas follows no aim"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "TargetSettings":
        if self.name in self.adapters:
            raise ValueError(f"adapters.{self.name} has the name of the target: give the adapter another")
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
    """Model and workers of a draft. Model ``target`` is the target's own copy, in 4 bit by default."""

    sequences_per_replica: SequencesPerReplica = 64

    @model_validator(mode="after")
    def _a_process_has_one_gpu(self) -> "DraftSettings":
        if self.gpus is not None and self.gpus > 1:
            raise ValueError(f"gpus={self.gpus:g}: a draft uses one GPU; give at most 1, or more replicas")
        return self


class GatewayReplicas(RequestSettings, ReplicaSettings):
    """Settings of the gateways: their number, and their work with requests."""

    replicas: int | None = Field(
        default=None,
        ge=1,
        description="number of replicas; None: two for each replica of a target on GPUs, at its largest"
        " number of replicas, and one if the target is on CPUs",
    )
    drafters: tuple[str, ...] = Field(
        default=(), description=RequestSettings.model_fields["drafters"].description
    )
    router: Literal["least", "session"] = Field(
        default="least",
        description="gateway that gets a request. least: of two that with fewer requests; session: one"
        " gateway for all requests of a session, which the header x-session-id names",
    )
    cpus: float = Field(
        default=0.0,
        ge=0.0,
        description="CPUs of Ray per replica, which an autoscaler of nodes sees; 0: gateways take none",
    )
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
    tenants_file: str | None = Field(
        default=None, description="YAML file with the tenants: names with API keys and limits"
    )
    receipt_key_file: str | None = Field(
        default=None,
        description="PEM file of the private Ed25519 key that signs receipts of answers. Targets then read"
        " their weights once more at load, for digests. None: no receipts",
    )
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
