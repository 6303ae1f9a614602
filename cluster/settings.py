"""Everything that can be set about a deployment, in one place."""

import os
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.settings import EngineSettings
from gateway.settings import MAX_DEPTH, Drafter, GatewaySettings

DEMO_NAME = "outrider-demo"


class Settings(BaseModel):
    """``serve run cluster.app target=... depth=6``: each field is an argument, others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str | None = Field(default=None, description="local folder or hub id; None: the demo pair")
    draft: str | None = Field(default=None, description="the same for the draft; None and a target: no draft")
    name: str | None = Field(default=None, description="what clients call the target; None: as `target`")
    depth: int = Field(default=4, ge=0, le=MAX_DEPTH, description="tokens drafted per round")
    drafter: Drafter | None = Field(default=None, description="None: model if there is a draft, else ngram")
    draft_deadline_ms: float = Field(default=1000.0, gt=0.0, description="wait for a Draft, milliseconds")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="auto: the checkpoint's; None: float32 for the demo, else auto",
    )
    cache_memory: int | float = Field(
        default=0.2,
        gt=0.0,
        description="of each worker: bytes, or a share of the memory below 1",
    )

    gateways: int = Field(default=1, ge=1, description="replicas")
    targets: int = Field(default=1, ge=1, description="replicas")
    drafts: int = Field(default=1, ge=1, description="replicas")
    target_threads: int | None = Field(default=None, ge=1, description="on a CPU; None: all cores but one")
    draft_threads: int = Field(default=1, ge=1, description="on a CPU")
    target_gpus: float = Field(default=0.0, ge=0.0, description="per replica")
    draft_gpus: float = Field(default=0.0, ge=0.0, description="per replica")
    target_resources: dict[str, float] = Field(default_factory=dict, description="of Ray, per replica")
    draft_resources: dict[str, float] = Field(default_factory=dict, description="of Ray, per replica")

    http_host: str = Field(default="127.0.0.1", description="address that the HTTP proxy listens on")
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=9000, ge=1, le=65535)
    max_requests: int = Field(default=256, ge=1, description="requests at a time per gateway")

    def resolved(self) -> "Settings":
        """With nothing left open that depends on this machine or on another field."""
        is_demo = self.target is None
        target = self.target or _demo("target")
        draft = self.draft or (_demo("draft") if is_demo else None)
        return self.model_copy(
            update={
                "target": target,
                "draft": draft,
                "name": self.name or (DEMO_NAME if is_demo else target),
                "drafter": self.drafter or ("model" if draft else "ngram"),
                "dtype": self.dtype or ("float32" if is_demo else "auto"),
                "target_threads": self.target_threads or max(1, (os.cpu_count() or 1) - 1),
            }
        )

    def gateway(self) -> GatewaySettings:
        fields = self.model_dump(include={"depth", "drafter", "draft_deadline_ms"})
        return GatewaySettings.model_validate({"model": self.name, "tokenizer": self.target, **fields})

    def target_engine(self) -> EngineSettings:
        return self._engine(model=self.target, threads=self.target_threads)

    def draft_engine(self) -> EngineSettings:
        return self._engine(model=self.draft, threads=self.draft_threads)

    def _engine(self, **fields: str | int | None) -> EngineSettings:
        return EngineSettings.model_validate({**fields, **self.model_dump(include={"dtype", "cache_memory"})})


def _demo(role: str) -> str:
    return str(files("models").joinpath("demo", role))
