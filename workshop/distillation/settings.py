"""Settings of ``outrider distil``; each is an option."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from workshop.advice.settings import Temperature

DrafterKind = Literal["model", "parallel", "eagle3", "dflash", "medusa"]


class DistilSettings(BaseModel):
    """Settings of a distillation: drafter, amount of text, length of training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drafter: DrafterKind = Field(
        default="model",
        description="what is trained: a draft model, one that guesses several tokens in one pass (parallel),"
        " an EAGLE-3 head, a DSpark draft (dflash), Medusa heads",
    )
    draft: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint of the draft model to begin with, folder or hub id; None: the deployment's",
    )
    seed: int = Field(default=1, ge=0, lt=2**32, description="seed of all random numbers")
    texts: int = Field(default=20_000, ge=2, description="most texts; the newest ones of recorded traffic")
    held_out: int = Field(default=64, ge=1, description="most prompts that are judged on and not trained on")
    tokens: int = Field(default=160, ge=2, description="longest answer, tokens, if the target answers")
    temperatures: tuple[Temperature, ...] = Field(
        default=(1.0, 0.7, 0.0),
        min_length=1,
        description="temperatures of its answers, in turn; recorded traffic has its own",
    )
    steps: int = Field(default=1000, ge=1, description="most steps of the optimizer")
    rows: int = Field(default=8, ge=1, description="windows of text in a step")
    length: int = Field(default=256, ge=8, description="tokens of a window")
    depth: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="positions of a Draft that are trained, 1 for a draft model; None: 8 for dflash, else 4",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0.0,
        description="peak of the learning rate; None: 0.0002 for a draft model, 0.005 for heads",
    )
    measure_every: int = Field(
        default=50, ge=1, description="steps between measures, after which a killed one goes on"
    )
    patience: int = Field(
        default=6, ge=1, description="measures in a row without a gain, after which it stops"
    )
    lora: int | None = Field(
        default=None,
        ge=1,
        description="rank of adapters (LoRA) that are trained instead of a draft model's weights; needs peft;"
        " None: all weights are trained",
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        description="layers of the target whose inputs an EAGLE-3 head or a DSpark draft reads;"
        " None: 2, n / 2 and n - 3 of n",
    )
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="id of a token that no text has, for dflash and for a parallel draft;"
        " None: as the parallel draft's checkpoint says",
    )
    threads: int | None = Field(
        default=None, ge=1, description="threads of one operation on the CPU; None: all cores"
    )
