"""Types of responses about the service itself, as /openapi.json describes them."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from gateway.api.message_json import json_schema_of
from gateway.generation.readiness import Missing
from gateway.workers.streams import WorkerInfo
from outrider.pace.settings import PaceSettings
from protos import generation_pb2

Loads = Annotated[dict[str, Any], WithJsonSchema(json_schema_of(generation_pb2.Loads.DESCRIPTOR))]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="seconds since 1970, when the gateway started")]
    owned_by: Literal["outrider"]
    root: str
    parent: Annotated[str | None, Field(description="model of which it is an adapter; null: it is none")]
    max_model_len: Annotated[
        int | None,
        Field(description="tokens of context, prompt and answer together; null until a target is ready"),
    ]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


@dataclass(frozen=True)
class WorkerHealth(WorkerInfo):
    no_drafts_because: dict[str, str] = field(default_factory=dict)  # reasons by target drafter out of use


class Health(TypedDict):
    """State of the service; callers without access get the status alone."""

    status: Literal["ok"] | Missing
    workers: NotRequired[list[WorkerHealth]]
    access: NotRequired[Annotated[str, Field(description="whether callers need an API key")]]
    pace: NotRequired[PaceSettings]
    refused_live_settings: NotRequired[
        Annotated[
            str, Field(description="why the newest user_config is not in force; left out: it is in force")
        ]
    ]
    drafters: NotRequired[Annotated[dict[str, str], Field(description="meaning of each drafter by its name")]]
    sampling_defaults: NotRequired[
        Annotated[
            dict[str, float],
            Field(description="the checkpoint's defaults, for requests that leave settings out"),
        ]
    ]
    gateway: NotRequired[Annotated[dict[str, Any], Field(description="settings in force")]]


class Tokenized(TypedDict):
    count: int
    max_model_len: Annotated[int, Field(description="tokens of context, prompt and answer together")]
    tokens: list[int]
    token_strs: NotRequired[Annotated[list[str | None], Field(description="as the vocabulary spells them")]]


class Detokenized(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str
