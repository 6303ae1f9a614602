"""Settings of the pace, all of which may change while requests run."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_DEPTH = 16


class PaceSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["measured", "thresholds"] = Field(
        default="measured",
        description="measured: what gives the most tokens per second, by thresholds until estimates exist",
    )
    max_depth: int = Field(
        default=8, ge=0, le=MAX_DEPTH, description="drafted tokens per round at most; 0: none"
    )
    threshold_depth: int = Field(
        default=4, ge=0, le=MAX_DEPTH, description="drafted tokens per round under the thresholds"
    )
    off_below: float = Field(
        default=0.5, ge=0.0, le=1.0, description="threshold: acceptance rate at which drafting ends"
    )
    on_above: float = Field(
        default=0.6, ge=0.0, le=1.0, description="threshold: acceptance rate at which it begins again"
    )
    half_depth_from: int = Field(
        default=32, ge=0, description="threshold: running sequences from which the depth is halved"
    )
    off_from: int = Field(default=128, ge=0, description="threshold: running sequences that end drafting")
    hysteresis: float = Field(
        default=0.03,
        ge=0.0,
        lt=1.0,
        description="share by which Drafts count for more if the sequence has them, and else for less",
    )
    explores: bool = Field(
        default=True,
        description="whether to try now and then what does not pay at present, only to learn from it",
    )
    probe_tokens: int = Field(
        default=16, ge=1, description="plain tokens after which the drafter guesses again, to be compared"
    )
    exploration: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="share of the sequences for which a drafter that does not draft them guesses too, to be"
        " judged; drafters with a model, if there are several drafters",
    )
    trial_steps: int = Field(
        default=600,
        ge=1,
        description="steps of one kind, with Drafts or without, after which the other kind is tried",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "PaceSettings":
        if self.on_above < self.off_below:
            raise ValueError(f"on_above must be at least off_below, got {self.on_above} and {self.off_below}")
        return self
