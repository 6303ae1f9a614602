"""Settings of the gateway, and of speculation per request."""

from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.roster import BY_TASK, Roster
from outrider.decoding.settings import Verification
from outrider.drafters.name import TargetDrafterName, WorkerDrafterName
from outrider.pace.settings import MAX_DEPTH, PaceSettings

BODIES_AT_ONCE = 64  # request bodies that a gateway reads at a time
PREPARED_AT_ONCE = 64  # requests that a gateway prepares at a time: parsing, tokenization, grammars
SPARE_REQUESTS = 64  # further requests at a time: health, models, refusals
NAMES = ["model", "ngram", "suffix", "model+suffix"]  # names of the drafters that most deployments have
Priority = Literal["interactive", "batch"]


class RecordSettings(BaseModel):
    """Recording of traffic for `outrider distil`: token ids of prompts and answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fraction: float = Field(ge=0.0, le=1.0, description="share of all answers that is recorded; 0: none")
    folder: str = Field(
        pattern="^/", description="absolute path where each gateway writes; each machine has its own folder"
    )
    days: float = Field(default=7.0, gt=0.0, description="days after which an answer is deleted")
    max_bytes: int = Field(
        default=2**30,
        ge=2**12,
        description="bytes of all files in the folder; the oldest files are deleted first",
    )
    by_caller: bool = Field(
        default=False,
        description="use a folder for each API key, named by the first 12 digits of its SHA-256, so that the"
        " answers to one caller can be deleted",
    )
    callers: tuple[Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")], ...] = Field(
        default=(),
        description="first digits, at least 8, of the SHA-256 of API keys, as JSON: only answers to these"
        " callers are recorded. Default: answers to all callers",
    )


class AuditSettings(BaseModel):
    """Audits of answers in service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fraction: float = Field(
        ge=0.0,
        le=1.0,
        description="share of all answers that another replica of the target computes again; 0: none",
    )


class RequestSettings(BaseModel):
    """Limits and defaults of requests at a gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafters: tuple[str, ...] = Field(
        default=("model",),
        min_length=1,
        description="drafters for requests that name none: a draft, the target drafter, ngram, suffix or"
        " DRAFTER+suffix. With several, each task gets the fastest, and the first one until that is measured."
        " Default: the target drafter and all drafts, or ngram if there are neither",
    )
    past_answer_tokens: int = Field(
        default=2**18,
        ge=0,
        description="tokens of past answers that a gateway keeps in memory, by API key and task, for the"
        " drafter suffix; about 150 to 400 bytes each; 0: none",
    )
    stored_answer_bytes: int = Field(
        default=2**26,
        ge=0,
        description="bytes of memory for the answers that `draft_from`, `previous_response_id` and GET of"
        " /v1/responses find again; the oldest are dropped first; 0: none are kept",
    )
    propose_deadline_ms: float = Field(
        default=1000.0,
        gt=0.0,
        description="longest wait for a Draft, milliseconds; then decoding is plain for that round",
    )
    request_deadline_s: float = Field(
        default=600.0,
        gt=0.0,
        description="time from arrival to the last token, seconds; lost targets included",
    )
    grammar_compile_s: int = Field(
        default=2,
        ge=1,
        le=10,
        description="processor time for compiling the grammar of one request, seconds; a grammar that takes"
        " more is refused",
    )
    max_losses: int = Field(
        default=3,
        ge=1,
        description="lost targets after which a request fails, if no token came in between",
    )
    second_targets_share: float = Field(
        default=0.05,
        ge=0.0,
        le=1.0,
        description="share of the targets' time that second targets may take: a sequence whose target is late"
        " is opened at another target, and the first of the two to answer goes on. 0: none",
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="tokens; None: the context of the target"
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="tokens; None: the context of the target"
    )
    max_choices: int = Field(
        default=64, ge=1, description="answers to one request, counted over all of its prompts"
    )
    max_requests: int = Field(
        default=256, ge=1, description="requests that run at the same time in each gateway"
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        description="requests in a gateway's queue; more are refused with 429. Interactive requests have as"
        " many places of their own",
    )
    max_message_bytes: int = Field(default=4 * 2**20, ge=1, description="bytes of one request")
    body_timeout_s: float = Field(
        default=30.0, gt=0.0, description="longest time in which the body of a request must arrive, seconds"
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="what happens to unknown fields; a header of the answer names the ignored ones",
    )
    sampling_defaults: Literal["checkpoint", "neutral"] = Field(
        default="checkpoint",
        description="source of temperature, top_k, top_p, min_p and repetition_penalty if a request has none."
        " checkpoint: the target's generation_config.json; neutral: the defaults of requests",
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="turn text like a special token into that token, in messages, tools and"
        " chat_template_kwargs. False: it stays text",
    )
    record: RecordSettings | None = Field(
        default=None, description="recording of traffic, to fit a draft to it; None: nothing is recorded"
    )
    audit: AuditSettings | None = Field(
        default=None,
        description="audits of answers, which find a device that computes wrong numbers; None: none are made",
    )
    trace_texts: bool = Field(default=False, description="put prompts and answers into the traces")

    @property
    def most_at_once(self) -> int:
        """Number of requests that a gateway may hold at a time: all that it limits itself, and a reserve."""
        answered = self.max_requests + 2 * self.max_waiting
        return BODIES_AT_ONCE + PREPARED_AT_ONCE + self.max_waiting + answered + SPARE_REQUESTS


class TenantSettings(BaseModel):
    """Limits of one tenant, and its place in the queue."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(
        default=1.0,
        gt=0.0,
        description="share of the tokens that it gets while several tenants wait, relative to other weights",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="requests that may begin in a minute; None: any number"
    )
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="tokens of prompts and answers in a minute; None: any number"
    )
    parallel_requests: int | None = Field(
        default=None, ge=1, description="requests that may wait or run at the same time; None: any number"
    )
    highest_priority: Priority = Field(
        default="interactive", description="most urgent priority of its requests, whatever they ask for"
    )

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit on requests or tokens."""
        limits = (self.requests_per_minute, self.tokens_per_minute, self.parallel_requests)
        return any(limit is not None for limit in limits)


class CallerSettings(BaseModel):
    """Callers that are answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow_anonymous: bool = Field(
        default=False, description="answer callers from other machines even if there are no API keys"
    )
    allowed_origins: tuple[Annotated[str, Field(pattern="^https?://[^/*]+$")], ...] = Field(
        default=(),
        description="sites whose pages may ask from a browser, as JSON, such as https://chat.example.org"
        " (CORS). Default: pages of this machine alone",
    )


class GatewaySettings(RequestSettings, CallerSettings):
    """Settings of one gateway."""

    model: str = Field(description="the name under which clients know the target")
    adapters: tuple[str, ...] = Field(default=(), description="names of the adapters of its settings")
    adapter_folder: str | None = Field(
        default=None, description="folder from which requests may load further adapters; None: they may not"
    )
    max_loaded_adapters: int = Field(default=0, description="adapters that requests have loaded, at most")
    tokenizer: str = Field(description="local folder or hub id that holds tokenizer.json")
    drafts: dict[str, WorkerDrafterName] = Field(
        default={"model": "model"}, description="drafts by name, with the kind of drafter of each"
    )
    target_drafters: tuple[TargetDrafterName, ...] = Field(
        default=(), description="drafters that run in the target's process"
    )
    direct_grpc: str | None = Field(
        default=None, description="host:port of the gateway's own gRPC server; None: it has none"
    )
    api_key_digests: tuple[str, ...] = Field(
        default=(), repr=False, description="SHA-256 of accepted API keys"
    )
    tenants: dict[str, TenantSettings] = Field(default={}, description="tenants by name")
    tenant_keys: dict[str, str] = Field(
        default={}, repr=False, description="names of tenants by the SHA-256 of their API keys"
    )
    receipt_key: str | None = Field(
        default=None, repr=False, description="PEM of the private key that signs receipts; None: no receipts"
    )
    new_drafts: tuple[str, ...] = Field(
        default=(), description="drafts that are rolled out, next to the drafters in use"
    )

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names of the drafters for a request that names no drafter, new drafts last."""
        return (*self.drafters, *self.new_drafts)

    @property
    def usual_drafter(self) -> str:
        """Name of the drafter for a request that names no drafter."""
        return self.drafters[0] if len(self.candidates) == 1 else BY_TASK

    def changed(self, live: "LiveSettings") -> "GatewaySettings":
        """Returns the initial settings with live settings applied.

        Raises:
            ValueError: a draft has a name that is taken, or a drafter has a name that is unknown.
        """
        taken = {BY_TASK, *self.roster.names}
        if wrong := next((name for name in live.drafts if name in taken), None):
            raise ValueError(f"drafts.{wrong} has the name of something else: give the draft another")
        changed = self.model_copy(update={"drafts": {**self.drafts, **live.drafts}})
        drafters = live.drafters or self.drafters
        try:
            rows = [changed.roster.find(name) for name in drafters]
        except ValueError as error:
            raise ValueError(f"drafters={list(drafters)}: {error}") from None
        models = {row.asked for row in rows}
        new = tuple(name for name in live.drafts if name not in models)
        return changed.model_copy(update={"drafters": drafters, "new_drafts": new})

    @property
    def roster(self) -> Roster:
        """Drafters of the deployment."""
        return Roster(self.drafts, self.target_drafters)


class LiveSettings(PaceSettings):
    """Live settings of a gateway: Serve's ``user_config`` of the deployment ``gateway``."""

    drafts: dict[str, WorkerDrafterName] = Field(
        default={},
        description="drafts that have joined the service, with the kind of drafter of each; each is an "
        "application of Serve of that name. Drafts that `drafters` does not list are rolled out",
    )
    drafters: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None, description="replaces gateway.drafters; None: gateway.drafters holds"
    )

    @property
    def pace(self) -> PaceSettings:
        """Settings of the pace, without the drafts and drafters."""
        return PaceSettings.model_validate(self.model_dump(include=set(PaceSettings.model_fields)))


def live_refusal(error: ValidationError) -> str:
    """Returns a message with the name and value of each invalid live setting, and with what is accepted."""
    known = list(LiveSettings.model_fields)
    refusals = []
    for found in error.errors(include_url=False):
        name = ".".join(["user_config", *map(str, found["loc"])])
        given = f"{name}={found['input']!r}"
        if found["type"] == "extra_forbidden":
            near = get_close_matches(str(found["loc"][-1]), known) or known
            refusals.append(f"{given} is no live setting: {' or '.join(near)} is one")
        else:
            refusals.append(f"{given}: {found['msg']}")
    return "; ".join(refusals)


class Speculation(BaseModel):
    """Speculation as one request asks for it. Under every mode the text is the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["auto", "fixed", "off"] = Field(
        default="auto",
        description="auto: the depth that pays, or none; fixed: always the same depth; off: none",
    )
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] | None = Field(
        default=None, description="tokens drafted per round: at most with auto, exactly with fixed"
    )
    drafter: Annotated[str, Field(max_length=128, examples=NAMES)] | None = Field(
        default=None, description="name of a drafter of the service; None: the gateway's setting decides"
    )
    verification: Verification = Field(default="coupled", description="rule by which a Draft is verified")
    report: bool = Field(default=False, description="tell all counters of speculation in the usage")

    def resolved(self, drafter: str, pace: PaceSettings) -> "Speculation":
        """Returns the settings with a drafter and, unless the mode is off, a depth.

        drafter: a name, or BY_TASK.
        """
        default = {"auto": MAX_DEPTH, "fixed": max(1, pace.threshold_depth), "off": None}[self.mode]
        depth = default if self.mode == "off" or self.depth is None else self.depth
        return self.model_copy(update={"depth": depth, "drafter": self.drafter or drafter})
