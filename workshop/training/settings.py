"""What can be said of a training. The command's options are these fields."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, DirectoryPath, Field, FilePath

from workshop.training.optimization import LEARNING_RATE

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class CommandSettings(BaseModel):
    """What every command needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: DirectoryPath = Field(description="checkpoint folder of the target")
    output: Path = Field(description="what is written")
    seed: int = Field(default=1, ge=0, description="of all that is drawn")
    threads: int = Field(default=1, ge=1, description="threads of one operation on the CPU")


class AnswerTextSettings(CommandSettings):
    """Of the text that is trained on."""

    prompts: FilePath = Field(description='JSON file of prompts by kind: {"kind": ["prompt", ...], ...}')
    count: int | None = Field(default=None, ge=1, description="of prompts that are answered; None: all")
    at_once: int = Field(default=256, ge=1, description="prompts that are answered at a time")
    tokens: int = Field(default=160, ge=1, description="of an answer at most")
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        default=(1.0, 0.7, 1.0, 0.7, 0.0), min_length=1, description="of the answers, in turn"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of the target's weights; auto takes the checkpoint's"
    )


class TrainingSettings(CommandSettings):
    """Of every drafter that is trained."""

    text: FilePath = Field(description="file of the target's text, as the command `text` writes it")
    steps: int = Field(default=1000, ge=1, description="of the optimizer")
    rows: int = Field(default=8, ge=1, description="windows of text in a step")
    length: int = Field(default=256, ge=8, description="tokens of a window")
    depth: int = Field(default=4, ge=1, le=16, description="positions of a Draft that are trained")
    learning_rate: float = Field(
        default=LEARNING_RATE, gt=0.0, description="at its peak; less for weights that are trained already"
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="measures in a row without a gain, after which it stops, and keeps the weights that were"
        " best; None: all steps are taken, and the last weights are kept",
    )
    save_every: int = Field(default=100, ge=1, description="steps, after which a killed training goes on")
    measure_every: int = Field(default=100, ge=1, description="steps between measures on held-out text")


class Eagle3Settings(TrainingSettings):
    """Of an EAGLE-3 head."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="of the target, whose inputs are read; None: 2, n / 2 and n - 3 of n"
    )
    intermediate_size: int | None = Field(
        default=None, ge=1, description="of its feed-forward network; None: the target's"
    )
    kept: Share = Field(
        default=0.5, description="of the positions of a text, from which Drafts go on beyond the first token"
    )


class MedusaSettings(TrainingSettings):
    """Of Medusa heads: one for each position of a Draft."""


class EarlyExitSettings(TrainingSettings):
    """Of exits of the target itself: a matrix and a norm for each."""

    exits: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="numbers of layers, after each of which it may leave; None: all but the last",
    )


class ModelTrainingSettings(TrainingSettings):
    """Of a draft model that drafts token by token."""

    draft: DirectoryPath = Field(description="checkpoint folder of the model that is trained on")
    depth: int = Field(default=1, ge=1, le=1, description="one position: all of its Draft are guessed alike")
    lora: int | None = Field(
        default=None,
        ge=1,
        description="rank of adapters (LoRA) that are trained in its place and then become a part of it;"
        " needs peft; None: all of its weights are trained",
    )


class ParallelSettings(TrainingSettings):
    """Of a draft model that is to guess several tokens in one pass."""

    draft: DirectoryPath = Field(description="checkpoint folder of the model that it is made of")
    mask_token: int = Field(ge=0, description="id of a token that no text has, which stands for a guess")
    kept: Share = Field(
        default=0.7, description="of the Drafts, for each position beyond the first: deeper ones are dropped"
    )
