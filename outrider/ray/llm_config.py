"""Ray's ``LLMConfig`` and the arguments of its ``build_openai_app``."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from outrider.ray.engine_kwargs import EngineKwargs
from outrider.ray.mirror import Mirror, without_meaning

Placement = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
Bundle = dict[str, float]
ONE_TARGET = "there is one target a service: give each its own service, or its own `serve run`"
IN_APPLICATION = "give runtime_env to the application of the config file, beside import_path"
BY_GATEWAY = (
    "gateways choose the target, by the prefixes that it holds and by its load;"
    " gateway.router=session keeps a session at one gateway"
)
BY_OUTRIDER = "Outrider's deployments have their own"


class ModelLoadingConfig(Mirror):
    """Name and place of the model."""

    model_id: str = Field(min_length=1, description="target.name, which requests give as model")
    model_source: str | None = Field(
        default=None,
        min_length=1,
        description="target.model: a folder on every node of the target, or a hub id; None: model_id",
    )
    tokenizer_source: Literal[None] = Field(default=None, description="the tokenizer is the checkpoint's own")

    @field_validator("model_source", mode="after")
    @classmethod
    def _is_here(cls, source: str | None) -> str | None:
        return None if source is None else without_cloud(source)


class LoraConfig(Mirror):
    """Adapters that requests load and unload: `POST /v1/load_lora_adapter`."""

    dynamic_lora_loading_path: str | None = Field(
        default=None, description="target.adapter_folder: a folder on every node of the target"
    )
    max_num_adapters_per_replica: int | None = Field(
        default=None, ge=1, description="target.max_loaded_adapters"
    )
    download_timeout_s: Any = without_meaning("adapters are read from a folder")
    max_download_tries: Any = without_meaning("adapters are read from a folder")

    @field_validator("dynamic_lora_loading_path", mode="after")
    @classmethod
    def _is_here(cls, folder: str | None) -> str | None:
        return None if folder is None else without_cloud(folder)


class AcceleratorConfig(Mirror):
    """Kind of the devices."""

    kind: Literal["gpu", "cpu"] = Field(description="cpu: target.gpus=0 and drafts.model.gpus=0")


class PlacementGroupConfig(Mirror):
    """Resources of each rank of the target, and the place of its ranks."""

    bundle_per_worker: Bundle | None = Field(
        default=None,
        description="GPU: target.gpus; CPU: no meaning here, as cores are shared; others: target.resources",
    )
    bundles: list[Bundle] | None = Field(
        default=None, min_length=1, description="the same for each rank: equal bundles, one for each"
    )
    strategy: Placement | None = Field(default=None, description="target.placement")

    @model_validator(mode="after")
    def _bundles_are_equal(self) -> "PlacementGroupConfig":
        if self.bundle_per_worker is not None and self.bundles is not None:
            raise ValueError("give bundle_per_worker or bundles")
        if any(bundle != self.bundle for bundle in self.bundles or ()):
            raise ValueError("bundles differ, and ranks of a target do not: give bundle_per_worker")
        return self

    @property
    def bundle(self) -> Bundle:
        """Resources of a rank."""
        return self.bundle_per_worker or (self.bundles or [{}])[0]


class ReplicaScaling(Mirror):
    """Serve's ``autoscaling_config`` of the target."""

    min_replicas: int = Field(default=1, ge=1, description="target.replicas")
    max_replicas: int = Field(default=1, ge=1, description="target.max_replicas")
    target_ongoing_requests: int | None = Field(
        default=None, ge=1, description="target.sequences_per_replica"
    )
    upscale_delay_s: float | None = Field(default=None, ge=0.0, description="autoscaling.up_delay_s")
    downscale_delay_s: float | None = Field(default=None, ge=0.0, description="autoscaling.down_delay_s")
    initial_replicas: Any = without_meaning("a target begins with min_replicas")
    look_back_period_s: Any = without_meaning("reports of 15 seconds are averaged")
    metrics_interval_s: Any = without_meaning("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S says it")
    upscaling_factor: Any = without_meaning(BY_OUTRIDER)
    downscaling_factor: Any = without_meaning(BY_OUTRIDER)
    aggregation_function: Any = without_meaning(BY_OUTRIDER)
    policy: Any = without_meaning(BY_OUTRIDER)


class RayActorOptions(Mirror):
    """Options of the target's actors."""

    resources: Bundle | None = Field(default=None, description="target.resources, for each rank")
    num_gpus: Any = without_meaning("placement_group_config says it")
    num_cpus: Any = without_meaning("cores are shared: target.threads bounds them")
    memory: Any = without_meaning("the memory plan says what fits")
    runtime_env: Literal[None] = Field(default=None, description=IN_APPLICATION)


class DeploymentConfig(Mirror):
    """Serve's options of the deployment with the target."""

    num_replicas: int | None = Field(
        default=None, ge=1, description="target.replicas; for `auto` give autoscaling_config"
    )
    autoscaling_config: ReplicaScaling | None = Field(
        default=None, description="None: a fixed number of replicas"
    )
    max_ongoing_requests: int | None = Field(
        default=None, ge=1, description="gateway.max_requests: in each gateway, not in each target"
    )
    max_queued_requests: int | None = Field(
        default=None, ge=0, description="gateway.max_waiting: in each gateway; more are refused with 429"
    )
    ray_actor_options: RayActorOptions = RayActorOptions()
    user_config: Literal[None] = Field(
        default=None, description="live settings are those of the deployment gateway: leave it out"
    )
    name: Any = without_meaning("the deployments are gateway, target and draft-model")
    request_router_config: Any = without_meaning(BY_GATEWAY)
    health_check_period_s: Any = without_meaning(BY_OUTRIDER)
    health_check_timeout_s: Any = without_meaning(BY_OUTRIDER)
    graceful_shutdown_wait_loop_s: Any = without_meaning(BY_OUTRIDER)
    graceful_shutdown_timeout_s: Any = without_meaning(BY_OUTRIDER)
    logging_config: Any = without_meaning(BY_OUTRIDER)

    @model_validator(mode="after")
    def _number_is_given_once(self) -> "DeploymentConfig":
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError("give num_replicas or autoscaling_config")
        return self


class ExperimentalConfigs(Mirror):
    """What Ray calls experimental."""

    num_ingress_replicas: int | None = Field(default=None, ge=1, description="gateway.replicas")
    stream_batching_interval_ms: Any = without_meaning("tokens that wait for a client travel together")


class LLMConfig(Mirror):
    """Ray's description of one model and of its deployment."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: EngineKwargs = EngineKwargs()
    deployment_config: DeploymentConfig = DeploymentConfig()
    accelerator_type: str | None = Field(
        default=None, min_length=1, description="target.accelerator; A10 is A10G"
    )
    accelerator_config: AcceleratorConfig | None = Field(
        default=None, description="None: what the nodes have"
    )
    placement_group_config: PlacementGroupConfig = PlacementGroupConfig()
    lora_config: LoraConfig = LoraConfig()
    experimental_configs: ExperimentalConfigs = ExperimentalConfigs()
    runtime_env: Literal[None] = Field(default=None, description=IN_APPLICATION)
    server_cls: Literal[None] = Field(default=None, description="Outrider's workers serve: leave it out")
    callback_config: Literal[None] = Field(default=None, description="nothing is called back: leave it out")
    llm_engine: Any = without_meaning("Outrider's own engine serves")
    log_engine_metrics: Any = without_meaning("metrics are always recorded")

    @model_validator(mode="after")
    def _each_rank_has_a_bundle(self) -> "LLMConfig":
        bundles, ranks = self.placement_group_config.bundles, self.engine_kwargs.tensor_parallel_size or 1
        if bundles is not None and len(bundles) != ranks:
            raise ValueError(
                f"placement_group_config.bundles holds {len(bundles)}, and"
                f" engine_kwargs.tensor_parallel_size={ranks} asks for one for each rank"
            )
        return self


class IngressDeploymentConfig(Mirror):
    """Serve's options of the deployment that callers reach: the gateways."""

    num_replicas: int | None = Field(default=None, ge=1, description="gateway.replicas")
    autoscaling_config: Any = without_meaning("the number of gateways is fixed: gateway.replicas")
    max_ongoing_requests: Any = without_meaning("deployment_config.max_ongoing_requests bounds a gateway")
    max_queued_requests: Any = without_meaning("deployment_config.max_queued_requests bounds its queue")
    ray_actor_options: Any = without_meaning("gateway.resources and gateway.cpus say where gateways run")


class BuilderArguments(Mirror):
    """Arguments of ``build_openai_app``. Settings of Outrider may stand beside them, by their paths."""

    llm_configs: list[dict[str, Any] | str] = Field(
        min_length=1,
        description=f"an LLMConfig, or the path of a YAML file that holds it; {ONE_TARGET}",
    )
    ingress_deployment_config: IngressDeploymentConfig = IngressDeploymentConfig()
    ingress_cls_config: Literal[None] = Field(
        default=None, description="Outrider's gateway is the ingress: leave it out"
    )

    @field_validator("llm_configs", mode="after")
    @classmethod
    def _is_one(cls, configs: list[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
        if len(configs) > 1:
            raise ValueError(f"{len(configs)} models: {ONE_TARGET}")
        return configs


def without_cloud(place: str) -> str:
    """Returns a folder or hub id unchanged. Raises ValueError for the URL of a cloud."""
    if "://" in place:
        raise ValueError(f"{place!r} is in a cloud: give a folder on every node of the target, or a hub id")
    return place
