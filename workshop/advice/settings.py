"""How advice is asked for."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from outrider.pace.settings import MAX_DEPTH

Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Streams = Annotated[int, Field(ge=1, le=4096)]
Dollars = Annotated[float, Field(gt=0.0)]


class AdviceSettings(BaseModel):
    """Every field is an option of `outrider advise`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperatures: tuple[Temperature, ...] = Field(
        default=(0.0, 0.7, 1.0), min_length=1, description="at which the target answers"
    )
    tokens: int = Field(default=128, ge=2, description="of an answer at most")
    seed: int = Field(default=1, ge=0, lt=2**64, description="of the answers")
    depth: int = Field(default=8, ge=1, le=MAX_DEPTH, description="drafted tokens in a round at most")
    streams: tuple[Streams, ...] = Field(
        default=(1, 8, 32, 128), min_length=1, description="sequences at a time, for which speed is told"
    )
    round_ms: float = Field(
        default=3.0,
        ge=0.0,
        description="milliseconds of a round beside the steps of draft and target: hops, the gateway's part",
    )
    repetitions: int = Field(default=3, ge=1, description="measured steps of each size")
    candidate_seconds: float = Field(
        default=120.0,
        gt=0.0,
        description="for which a candidate is measured and judged once it is loaded; then it is given up",
    )
    price_per_hour: Dollars | None = Field(
        default=None, description="dollars, of the devices of one target replica"
    )
    draft_price_per_hour: Dollars | None = Field(
        default=None, description="dollars, of the device of one draft replica"
    )
