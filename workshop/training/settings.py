"""Settings of training; each is an option of the command."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, DirectoryPath, Field, FilePath

from workshop.training.optimization import LEARNING_RATE

Share = Annotated[float, Field(gt=0.0, le=1.0)]


class CommandSettings(BaseModel):
    """Settings of every command."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: DirectoryPath = Field(description="checkpoint folder of the target")
    output: Path = Field(description="file or folder that is written")
    seed: int = Field(default=1, ge=0, description="seed of all random numbers")
    threads: int = Field(default=1, ge=1, description="threads of one operation on the CPU")


class AnswerTextSettings(CommandSettings):
    """Settings of the text that is trained on."""

    prompts: FilePath = Field(description='JSON file of prompts by kind: {"kind": ["prompt", ...], ...}')
    count: int | None = Field(
        default=None, ge=1, description="number of prompts that are answered; None: all"
    )
    at_once: int = Field(default=256, ge=1, description="prompts that are answered at a time")
    tokens: int = Field(default=160, ge=1, description="longest answer, tokens")
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        default=(1.0, 0.7, 1.0, 0.7, 0.0), min_length=1, description="temperatures of the answers, in turn"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="type of the target's weights; auto takes the checkpoint's"
    )


class TrainingSettings(CommandSettings):
    """Settings of every trained drafter."""

    text: FilePath = Field(description="file of the target's text, as the command `text` writes it")
    steps: int = Field(default=1000, ge=1, description="steps of the optimizer")
    rows: int = Field(default=8, ge=1, description="windows of text in a step")
    length: int = Field(default=256, ge=8, description="tokens of a window")
    depth: int = Field(default=4, ge=1, le=16, description="positions of a Draft that are trained")
    learning_rate: float = Field(
        default=LEARNING_RATE,
        gt=0.0,
        description="peak of the learning rate; less for weights that are trained already",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="measures in a row without a gain, after which training stops and keeps the best weights;"
        " None: all steps are taken, and the last weights are kept",
    )
    save_every: int = Field(default=100, ge=1, description="steps, after which a killed training goes on")
    measure_every: int = Field(default=100, ge=1, description="steps between measures on held-out text")


class Eagle3Settings(TrainingSettings):
    """Settings of an EAGLE-3 head."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="layers of the target whose inputs are read; None: 2, n / 2 and n - 3 of n"
    )
    intermediate_size: int | None = Field(
        default=None, ge=1, description="width of its feed-forward network; None: the target's"
    )
    kept: Share = Field(
        default=0.5, description="share of a text's positions whose Drafts go on beyond the first token"
    )


class DFlashSettings(TrainingSettings):
    """Settings of a DSpark draft, which guesses a block of tokens in one pass."""

    depth: int = Field(default=8, ge=2, le=16, description="rows of a block, each of which guesses a token")
    mask_token: int = Field(ge=0, description="id of a token that no text has, which stands for a guess")
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="layers of the target whose inputs are read; None: 2, n / 2 and n - 3 of n"
    )
    draft_layers: int = Field(default=2, ge=1, description="layers of the draft")
    intermediate_size: int | None = Field(
        default=None, ge=1, description="width of its feed-forward networks; None: the target's"
    )
    markov_rank: int = Field(
        default=128, ge=1, description="numbers that stand for a token in its correction of the next guess"
    )
    anchors: int = Field(
        default=64,
        ge=1,
        description="blocks that are trained in each window of text, more if they are shorter",
    )


class MedusaSettings(TrainingSettings):
    """Settings of Medusa heads: one for each position of a Draft."""


class EarlyExitSettings(TrainingSettings):
    """Settings of the target's own exits: a matrix and a norm for each."""

    exits: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="layers after which it may leave; None: all but the last",
    )


class ModelTrainingSettings(TrainingSettings):
    """Settings of a draft model that drafts token by token."""

    draft: DirectoryPath = Field(description="checkpoint folder of the model that is trained on")
    depth: int = Field(
        default=1, ge=1, le=1, description="one position: all positions of a Draft are guessed alike"
    )
    lora: int | None = Field(
        default=None,
        ge=1,
        description="rank of adapters (LoRA) that are trained instead and then become a part of the draft;"
        " needs peft; None: all weights are trained",
    )


class ParallelSettings(TrainingSettings):
    """Settings of a draft model that guesses several tokens in one pass."""

    draft: DirectoryPath = Field(description="checkpoint folder of the model that it is made of")
    mask_token: int = Field(ge=0, description="id of a token that no text has, which stands for a guess")
    kept: Share = Field(default=0.7, description="share of Drafts kept at each position beyond the first")
