"""Settings of ``outrider advise``."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from outrider.pace.settings import MAX_DEPTH

Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Streams = Annotated[int, Field(ge=1, le=4096)]
Dollars = Annotated[float, Field(gt=0.0)]


class AdviceSettings(BaseModel):
    """Settings of ``outrider advise``; each is an option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperatures: tuple[Temperature, ...] = Field(
        default=(0.0, 0.7, 1.0), min_length=1, description="temperatures at which the target answers"
    )
    tokens: int = Field(default=128, ge=2, description="longest answer, tokens")
    seed: int = Field(default=1, ge=0, lt=2**64, description="seed of the answers")
    depth: int = Field(default=8, ge=1, le=MAX_DEPTH, description="most drafted tokens of a round")
    streams: tuple[Streams, ...] = Field(
        default=(1, 8, 32, 128),
        min_length=1,
        description="sequences at a time, for which the speed is told",
    )
    round_ms: float = Field(
        default=3.0,
        ge=0.0,
        description="milliseconds of a round besides the steps of draft and target: hops, the gateway's part",
    )
    repetitions: int = Field(default=3, ge=1, description="measured steps of each size")
    candidate_seconds: float = Field(
        default=120.0,
        gt=0.0,
        description="seconds to measure and judge a loaded candidate, after which it is given up",
    )
    price_per_hour: Dollars | None = Field(
        default=None, description="dollars for the devices of one target replica"
    )
    draft_price_per_hour: Dollars | None = Field(
        default=None, description="dollars for the device of one draft replica"
    )
