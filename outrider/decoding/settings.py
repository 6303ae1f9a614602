"""Settings of a request's sampling, and the log-probabilities that it can ask for.

Torch-free: the gateway validates with these settings, the engine obeys them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from outrider.decoding.philox import noise_key

TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-1e4, le=1e4)]  # far beyond any logit, far below an overflow
Verification = Literal["coupled", "rejection", "block"]
NoiseScope = Literal["prompt", "seed"]

SEED_BITS = 64
SMALLEST_TEMPERATURE = 1e-6  # least temperature other than 0: a logit divided by less could overflow


class RequestedSampling(BaseModel):
    """Sampling settings of a caller. They apply at every position, drafted positions included.

    The order in which they change the logits is that of outrider/decoding/sampling.py: logit bias and
    penalties, then token bans, then temperature, then top-k, top-p and min-p.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=100.0,
        description=f"0 chooses the likeliest token; else at least {SMALLEST_TEMPERATURE:g}",
    )
    top_k: int = Field(default=0, ge=0, description="keep the k likeliest tokens; 0 keeps all")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="keep the smallest set with this mass")
    min_p: float = Field(
        default=0.0, ge=0.0, le=1.0, description="drop tokens below this share of the likeliest"
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=0.01,
        le=100.0,
        description="above 1 makes every token of prompt and output less likely, below 1 more",
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="taken from the logit of each token of the output"
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="taken from the logit of each token of the output, once for each occurrence",
    )
    logit_bias: dict[TokenId, Bias] = Field(
        default_factory=dict, description="numbers added to the logits of tokens, by id"
    )
    min_tokens: int = Field(
        default=0,
        ge=0,
        description="tokens that come before any end: of sequence, by a stop token or a stop string",
    )
    max_tokens: int = Field(
        default=16, ge=1, validate_default=True, description="tokens after which the generation ends"
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(), description="tokens that end the generation like an end of sequence"
    )
    ignore_eos: bool = Field(default=False, description="go on after an end of sequence")
    allowed_token_ids: tuple[TokenId, ...] | None = Field(
        default=None, description="the only tokens that may be chosen; None allows all"
    )
    bad_token_ids: tuple[TokenId, ...] = Field(
        default=(), validate_default=True, description="tokens that are never chosen"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**SEED_BITS,
        description="seed of the noise; None: a seed is drawn and reported",
    )
    noise_scope: NoiseScope = Field(
        default="prompt",
        description="prompt: each prompt has noise of its own; seed: all prompts share the noise of a seed",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="likeliest tokens reported per position"
    )
    logprobs_of: Literal["raw", "processed"] = Field(
        default="raw", description="log-probabilities before or after these settings"
    )

    @field_validator("temperature")
    @classmethod
    def _is_zero_or_not_tiny(cls, temperature: float) -> float:
        if 0.0 < temperature < SMALLEST_TEMPERATURE:
            raise ValueError(f"temperature={temperature:g} must be 0, or at least {SMALLEST_TEMPERATURE:g}")
        return temperature

    @field_validator("max_tokens")
    @classmethod
    def _leaves_room_for_min_tokens(cls, max_tokens: int | None, info: ValidationInfo) -> int | None:
        min_tokens = info.data.get("min_tokens", 0)
        if max_tokens is not None and max_tokens < min_tokens:
            raise ValueError(f"max_tokens={max_tokens} must not be below min_tokens={min_tokens}")
        return max_tokens

    @field_validator("bad_token_ids")
    @classmethod
    def _leaves_a_token(cls, bad: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        allowed = info.data.get("allowed_token_ids")
        if allowed is not None and not set(allowed) - set(bad):
            raise ValueError(
                f"of allowed_token_ids={list(allowed)} no token is left: name one not in bad_token_ids"
            )
        return bad


class Sampling(RequestedSampling):
    """Settings that choose the tokens of one sequence and verify its Drafts."""

    verification: Verification = Field(default="coupled", description="rule by which a Draft is verified")
    grammar: str | None = Field(
        default=None, description="grammar of the answer; see outrider/decoding/grammar.py"
    )

    def noise_origin(self, prompt_length: int) -> int:
        """Returns the position in the sequence, in tokens, at which noise positions begin.

        Prompts of any length that share their noise share it from the first token of the answer on.
        """
        return prompt_length if self.noise_scope == "seed" else 0

    def noise_key(self, choice: int, prompt: Sequence[int]) -> int:
        """Returns the noise key of an answer; the seed must have been drawn.

        Args:
            choice: index among the answers to the prompt.
            prompt: token ids.
        """
        assert self.seed is not None
        return noise_key(self.seed, choice, prompt if self.noise_scope == "prompt" else ())


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural logarithm) at one position."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), likeliest first
