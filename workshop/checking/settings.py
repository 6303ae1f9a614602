"""Settings of ``outrider check``: its requests, and the thresholds above which deployments differ."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from outrider.decoding.settings import Verification

Kind = Literal["greedy", "sampled", "truncated", "json"]
Mode = Literal["auto", "fixed", "off"]
Score = Literal["length", "exact", "contains"]


class CheckSettings(BaseModel):
    """Settings of ``outrider check``; each is an option."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    requests: int = Field(
        default=200, ge=0, le=10**6, description="seeded requests that both answer; 0: none are compared"
    )
    answer_tokens: int = Field(default=64, ge=1, description="longest of these answers, tokens")
    paired: Path | None = Field(
        default=None,
        description="file of items, on each line an object with `prompt`, and if there is one `expected` and"
        " `changed`: A and B answer them with common noise, and nothing else is checked",
    )
    score: Score = Field(
        default="length",
        description="score of an item: tokens of the answer; 1 if it is `expected`; 1 if it contains that",
    )
    fresh: bool = Field(
        default=False, description="B answers the items also without the answers of A, to compare the texts"
    )
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = Field(
        default=("greedy", "sampled", "truncated", "json"),
        description="settings of these requests, in turn: temperature 0; temperature 1; temperature 0.8 with"
        " top_k, top_p and a penalty; temperature 1 in the form of a JSON object",
    )
    samples: int = Field(
        default=256,
        ge=0,
        le=10**5,
        description="texts that each deployment draws for each prompt, to compare distributions; 0: no test",
    )
    sampled_prompts: int = Field(
        default=8, ge=1, description="prompts of this test, the first of all prompts"
    )
    sampled_tokens: int = Field(default=8, ge=1, description="tokens of each text of this test")
    temperature: float = Field(
        default=1.0, gt=0.0, le=100.0, description="temperature of these texts, and of items"
    )
    verification: Verification = Field(
        default="coupled", description="rule that verifies the Drafts of these texts"
    )
    a_speculation: Mode = Field(default="auto", description="mode of speculation that requests to A name")
    b_speculation: Mode = Field(default="auto", description="mode of speculation that requests to B name")
    prompts: Path | None = Field(
        default=None,
        description="file of prompts, on each line a JSON text, or an object with one as `prompt`;"
        " null: the prompts in workshop/checking/prompts.py",
    )
    text: Path | None = Field(
        default=None, description="file of the text whose perplexity is compared; null: the prompts"
    )
    tasks: tuple[str, ...] = Field(
        default=(), description="tasks that lm-eval, if installed, runs through both"
    )
    task_folder: Path | None = Field(default=None, description="folder of further tasks for lm-eval")
    task_limit: int | None = Field(
        default=None,
        ge=1,
        description="documents of each task; null: all",
        json_schema_extra={"unit": "documents"},
    )
    tokenizer: str | None = Field(
        default=None, description="folder or hub id of the tokenizer, which lm-eval needs"
    )
    tolerance: float = Field(
        default=1e-3,
        ge=0.0,
        description="difference of a token's log-probability that counts as rounding: in bfloat16 about 0.2",
        json_schema_extra={"unit": "nats"},
    )
    false_alarm: float = Field(
        default=1e-3,
        ge=5e-4,
        le=0.5,
        description="probability that a test calls two equal deployments different",
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="seed that all other seeds are made from")
    concurrency: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="requests at a time to each",
        json_schema_extra={"unit": "requests"},
    )
    timeout_s: float = Field(default=120.0, gt=0.0, description="longest wait for an answer, seconds")
