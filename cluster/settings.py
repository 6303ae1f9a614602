"""Settings of a deployment: filled in, checked, and converted for gateways and engines."""

import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from cluster.gpu_shares import equal_share, share_left
from cluster.groups import (
    DEFAULT_DRAFT,
    AccessSettings,
    AddressSettings,
    AutoscalingSettings,
    DraftName,
    DraftSettings,
    GatewayReplicas,
    Group,
    RaySettings,
    TargetSettings,
    TlsSettings,
)
from gateway.roster import BY_TASK, Roster
from gateway.settings import CallerSettings, GatewaySettings, RequestSettings
from outrider.demo import written_out
from outrider.drafters.registry import drafters as rows
from outrider.drafters.registry import row_of
from outrider.engine.settings import EngineSettings, ModelSettings, TargetDrafterSettings
from outrider.pace.settings import PaceSettings

DEMO_NAME = "outrider-demo"
DEMO_CACHE_BYTES = 2**28  # 4,096 tokens, so that the whole service fits into 4 GB
DEMO_SMALL = "demo-small"  # model of a target: the demo target as it was trained
DEMO_SMALL_NAME = "outrider-demo-small"
DEMO_PARALLEL = "outrider-demo-parallel"  # model of a draft: the demo draft trained for parallel drafting
DEMO_HEAD = "dflash"  # head of the demo target
COLOCATED = "colocated"  # drafter with the draft's model in the target's process
COLOCATED_FIELDS = {
    "model",
    "dtype",
    "quantization",
}  # settings of a draft that also apply in the target's process
PORTS = ("http_port", "grpc_port", "direct_grpc_port")  # fields of addresses
TARGET_ITSELF = "target"  # model of a draft: the target's own copy
# A target on a GPU makes up to 16,000 tokens a second (8B, 256 sequences, H100: docs/benchmarks.md), and a
# gateway carries 8,000 to 9,000 (0.11 to 0.13 ms a token). On CPUs a second gateway would take a core from
# the target.
GATEWAYS_OF_A_TARGET = 2


class Settings(Group):
    """Settings of one deployment. Open settings that follow from others are filled in.

    Without a target the demo pair is served, with its target written out at a realistic cost. Drafters that
    ``target.drafters`` names replace the demo draft.
    """

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
    _parallel: frozenset[str] = PrivateAttr(default=frozenset())  # drafts whose checkpoints are parallel

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Fills in settings that follow from other settings. A value of a wrong type is refused later."""
        target = given.get("target", {})
        if not isinstance(target, dict):
            return given
        is_small = target.get("model") == DEMO_SMALL
        is_demo = is_small or "model" not in target
        if is_demo:
            target = _demo_target(target, is_small=is_small)
        has_demo_draft = is_demo and not target.get("drafters")
        drafts = given.get("drafts") or ({DEFAULT_DRAFT: {}} if has_demo_draft else {})
        if isinstance(drafts, dict):
            drafts = {name: _draft_filled_in(draft, target, is_demo) for name, draft in drafts.items()}
        return {**given, "target": {"name": target["model"], **target}, "drafts": drafts}

    @model_validator(mode="after")
    def _drafters_are_there(self) -> "Settings":
        taken = {BY_TASK, *(row.name for row in rows())} - {DEFAULT_DRAFT}
        if wrong := next((name for name in self.drafts if name in taken), None):
            raise ValueError(f"drafts.{wrong} has the name of something else: give the draft another")
        for name in self.gateway.drafters:
            try:
                Roster(self._kinds, self.target.drafters).find(name)
            except ValueError as error:
                raise ValueError(f"gateway.drafters={self.gateway.drafters}: {error}") from None
        return self

    @model_validator(mode="after")
    def _each_port_is_given_once(self) -> "Settings":
        """Raises ValueError for a repeated port: its listener would fail, and blame another program."""
        names: dict[int, str] = {}
        for name, port in (
            *((f"addresses.{name}", getattr(self.addresses, name)) for name in PORTS),
            ("ray.metrics_port", self.ray.metrics_port),
        ):
            if port is not None and names.setdefault(port, name) != name:
                raise ValueError(f"{name}={port} is {names[port]} already: give another port")
        return self

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters of requests that name no drafter; the first drafts until more is known."""
        return self.gateway.drafters or (*self._target_drafters, *self.drafts) or ("ngram",)

    @property
    def _target_drafters(self) -> tuple[str, ...]:
        return tuple(row_of(setting).name for setting in self.target.drafters)

    @property
    def _kinds(self) -> dict[str, str]:
        """Name of each draft's row in the registry, by the name of the draft."""
        return {
            name: draft.worker_drafter or ("parallel" if name in self._parallel else "model")
            for name, draft in self.drafts.items()
        }

    def changed(self, *, target: Mapping[str, Any], drafts: Mapping[str, Mapping[str, Any]]) -> "Settings":
        """Returns settings with other values in fields of the target, and of the drafts by name."""
        others = {name: draft.model_copy(update=drafts.get(name, {})) for name, draft in self.drafts.items()}
        return self.model_copy(update={"target": self.target.model_copy(update=target), "drafts": others})

    def with_parallel_drafts(self, names: Iterable[str]) -> "Settings":
        """Returns settings in which these drafts use the drafter ``parallel``: a Draft takes one pass."""
        other = self.model_copy()
        other._parallel = frozenset(names)
        return other

    def with_gpus(self, gpus: float) -> "Settings":
        """Returns settings in which workers without ``gpus`` share the cluster's GPUs.

        Target and drafts get one GPU per replica, or equal shares that can be packed. If the target's share
        is given, or its ranks take a GPU each, drafts get the rest. A draft that would share a device with
        the target runs in the target's process instead. A target on GPUs gets several gateways.

        Raises:
            ValueError: the target is on GPUs and leaves no share for a draft whose share was left open.
        """
        return self._with_colocated_draft(gpus)._with_shares(gpus)._with_gateways()

    def _with_colocated_draft(self, gpus: float) -> "Settings":
        """Puts the model of a single draft into the target's process if the two would share a device.

        As two processes they would compete for the device. On CPUs the draft keeps its workers too, and
        routing picks the faster drafter. On a single GPU the draft keeps its workers only if a setting
        requires it. Such settings are less than a whole GPU for the target, and settings of the draft that
        the target's process cannot apply. The settings stay unchanged if they name a target drafter, a worker
        drafter or ``gateway.drafters``. The demo target gets its head too, because an idle head costs plain
        decoding almost nothing.
        """
        target, (draft, *others) = self.target, self.drafts.values() or (None,)
        if draft is None or others or target.drafters or self.gateway.drafters:
            return self
        if target.resources or draft.resources or draft.worker_drafter is not None:
            return self  # they may be on different nodes
        own = TargetDrafterSettings(checkpoint=draft.model, quantization=draft.quantization)
        beside = {"drafters": {COLOCATED: own, **self._demo_heads}}
        if gpus < 1 or (target.gpus == 0 and draft.gpus == 0):
            return self.changed(target=beside, drafts={})
        asks_for_workers = draft.model_fields_set - COLOCATED_FIELDS or draft.dtype != target.dtype
        if gpus == 1 and target.gpus in (None, 1.0) and not asks_for_workers:
            return self.changed(target=beside, drafts={}).model_copy(update={"drafts": {}})
        return self

    def _with_shares(self, gpus: float) -> "Settings":
        """Returns settings in which workers without ``gpus`` have a share. Raises as ``with_gpus``."""
        target = self.target
        open_drafts = [name for name, draft in self.drafts.items() if draft.gpus is None]
        drafts = sum(draft.most_replicas for draft in self.drafts.values())
        if target.gpus is None and target.tensor_parallel == 1:
            of_target = of_draft = equal_share(target.most_replicas + drafts, gpus)
        else:
            of_target = (1.0 if gpus >= 1 else 0.0) if target.gpus is None else target.gpus
            of_draft = share_left(target.most_replicas * target.tensor_parallel, of_target, drafts, gpus)
        if of_target and not of_draft and open_drafts:
            raise ValueError(self._none_left(of_target, open_drafts[0], gpus))
        return self.changed(
            target={} if target.gpus is not None else {"gpus": of_target},
            drafts={name: {"gpus": of_draft} for name in open_drafts},
        )

    def _with_gateways(self) -> "Settings":
        """Returns settings with a number of gateways, as many as the target can feed."""
        if self.gateway.replicas is not None:
            return self
        replicas = GATEWAYS_OF_A_TARGET * self.target.most_replicas if self.target.gpus else 1
        return self.model_copy(update={"gateway": self.gateway.model_copy(update={"replicas": replicas})})

    def _none_left(self, of_target: float, draft: str, gpus: float) -> str:
        """Returns the message that refuses a draft on a CPU with a target on GPUs, with accepted values.

        A step of such a draft takes longer than a step of the target, so it never pays. It would only take
        the machine's memory and processor.
        """
        target = self.target
        processes = target.most_replicas * target.tensor_parallel
        return (
            f"drafts.{draft}.gpus is left open, and target.tensor_parallel={target.tensor_parallel} with "
            f"target.gpus={of_target:g} takes {processes * of_target:g} of the cluster's {gpus:g} GPUs: give"
            " fewer target.tensor_parallel or one GPU more; target.gpus=0.9, with which drafts share a GPU of"
            f" the target; no draft; or drafts.{draft}.gpus=0 for a draft on the CPU, which hardly ever pays"
        )

    @property
    def has_written_out_demo(self) -> bool:
        """Whether the target is the demo target, written out at a realistic cost."""
        return written_out.is_written_out(self.target.model)

    @property
    def _demo_heads(self) -> dict[str, TargetDrafterSettings]:
        """Heads of the demo target; empty for another target."""
        if not self.has_written_out_demo:
            return {}
        return {DEMO_HEAD: TargetDrafterSettings.model_validate(_demo_drafter(DEMO_HEAD, {}, False))}

    def gateway_settings(self) -> GatewaySettings:
        """Returns settings of the gateways, without API keys, which are not settings."""
        requests = self.gateway.model_dump(include=set(RequestSettings.model_fields))
        callers = self.access.model_dump(include=set(CallerSettings.model_fields))
        host, port = self.addresses.http_host, self.addresses.direct_grpc_port
        return GatewaySettings(
            model=self.target.name,
            tokenizer=_demo("pair", "target") if self.has_written_out_demo else self.target.model,
            drafts=self._kinds,
            target_drafters=self._target_drafters,
            adapters=(*self.target.adapters,),
            adapter_folder=self.target.adapter_folder,
            max_loaded_adapters=self.target.max_loaded_adapters,
            direct_grpc=None if port is None else f"{host}:{port}",
            **{**requests, "drafters": self.drafters},
            **callers,
        )

    def target_engine(self) -> EngineSettings:
        """Returns settings of the target's engine; its worker resolves ``threads`` from its node's cores."""
        return self._engine(self.target, self.target.threads, self.target.gpus)

    def draft_engine(self, name: str) -> EngineSettings:
        """Returns settings of the engine of the draft with that name."""
        draft = self.drafts[name]
        engine = self._engine(draft, draft.threads or 1, draft.gpus)
        return engine.model_copy(update={"is_draft": True})

    def _engine(self, model: ModelSettings, threads: int | None, gpus: float | None) -> EngineSettings:
        fields = model.model_dump(include=set(EngineSettings.model_fields))
        return EngineSettings.model_validate(
            {**fields, "threads": threads, "device_share": self._device_share(gpus)}
        )

    def _device_share(self, gpus: float | None) -> float:
        """Returns a worker's share of a GPU; without GPUs its share of a machine with all such workers."""
        if gpus:
            return min(gpus, 1.0)
        on_cpus = 0 if self.target.gpus else self.target.most_replicas * self.target.tensor_parallel
        on_cpus += sum(draft.most_replicas for draft in self.drafts.values() if not draft.gpus)
        return 1.0 / max(on_cpus, 1)


def on_device(engine: EngineSettings, gpus: float) -> EngineSettings:
    """Returns settings of an engine with the device of a worker with this number of GPUs.

    Ray lets a worker without GPUs see all GPUs of its node, so an engine with a free choice would take the
    first GPU.
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


def _demo_target(given: dict[str, Any], *, is_small: bool) -> dict[str, Any]:
    """Returns the settings of the demo target: small, or written out at a realistic cost."""
    demo: dict[str, Any] = {"dtype": "float32"}
    if is_small:
        given = {name: value for name, value in given.items() if name != "model"}
        demo |= {"name": DEMO_SMALL_NAME, "model": _demo("pair", "target")}
    else:
        demo |= {"name": DEMO_NAME, "model": str(written_out.target()), "cache_memory": DEMO_CACHE_BYTES}
    if isinstance(drafters := given.get("drafters"), dict):
        demo["drafters"] = {name: _demo_drafter(name, own, is_small) for name, own in drafters.items()}
    return {**given, **demo, **{name: value for name, value in given.items() if name != "drafters"}}


def _demo(*path: str) -> str:
    return str(files("outrider.demo").joinpath(*path))


def _demo_drafter(name: Any, given: Any, is_small: bool) -> Any:
    """Returns the settings of a drafter of the demo target, with its checkpoint if it has a checkpoint."""
    folder, given = _demo("drafters", str(name)), {} if given is None else given
    if not (isinstance(given, dict) and os.path.isdir(folder)):
        return given
    return {"checkpoint": folder if is_small else str(written_out.target().with_name(name)), **given}
