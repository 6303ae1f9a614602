"""Training settings and trainee of each kind of drafter."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from outrider.engine.loading.special_tokens import mask_token
from outrider.engine.loading.vocabulary import check_vocabulary
from workshop.distillation.settings import DistilSettings
from workshop.training.dflash import DFlashTrainee
from workshop.training.eagle3 import Eagle3Trainee
from workshop.training.medusa import MedusaTrainee
from workshop.training.model import ModelTrainee
from workshop.training.optimization import LEARNING_RATE
from workshop.training.parallel import ParallelTrainee
from workshop.training.settings import (
    DFlashSettings,
    Eagle3Settings,
    MedusaSettings,
    ModelTrainingSettings,
    ParallelSettings,
    TrainingSettings,
)
from workshop.training.target import FrozenTarget
from workshop.training.trainee import Trainee

OF_TRAINED_WEIGHTS = 2e-4  # learning rate for a draft that is trained already
DEPTH, BLOCK = 4, 8  # trained positions of a Draft; for dflash, rows of a block
SETTINGS: dict[str, type[TrainingSettings]] = {
    "model": ModelTrainingSettings,
    "parallel": ParallelSettings,
    "eagle3": Eagle3Settings,
    "dflash": DFlashSettings,
    "medusa": MedusaSettings,
}
# options that only some kinds of drafters have
ONLY_OF = {"lora": ("model",), "layers": ("eagle3", "dflash"), "mask_token": ("parallel", "dflash")}


def options_of_kind(settings: DistilSettings, target: Path, draft: Path | None) -> dict[str, Any]:
    """Returns the fields that only the settings of this kind of drafter have.

    draft: initial checkpoint; None for heads.

    Raises:
        ValueError: an option is for another kind of drafter, or a needed option is missing.
        VocabularyMismatchError: the draft does not share the target's tokenizer.
    """
    of_kind: dict[str, Any] = {}
    for name, kinds in ONLY_OF.items():
        value = getattr(settings, name)
        if settings.drafter in kinds:
            of_kind[name] = value
        elif value is not None:
            raise ValueError(
                f"{name}={value!r} is for drafter={' or '.join(kinds)}, and drafter={settings.drafter}"
            )
    if settings.drafter == "dflash" and settings.depth == 1:
        raise ValueError("depth=1 must be at least 2 for drafter=dflash")
    if draft is not None:
        check_vocabulary(str(target), str(draft))
        of_kind["draft"] = draft
    if settings.drafter == "parallel" and settings.mask_token is None:
        of_kind["mask_token"] = mask_token(AutoConfig.from_pretrained(draft))
    if "mask_token" in of_kind and of_kind["mask_token"] is None:
        raise ValueError(
            f"mask_token: {str(draft or target)!r} names none, so give the id of a token that no text has"
        )
    return of_kind


def training_settings(
    settings: DistilSettings, of_kind: Mapping[str, Any], target: Path, text: Path, output: Path
) -> TrainingSettings:
    """Returns the settings of the training.

    Args:
        of_kind: result of ``options_of_kind``.
        text: file of the training text.
        output: folder with the state from which a killed training resumes.
    """
    usual_depth = BLOCK if settings.drafter == "dflash" else DEPTH
    usual_rate = OF_TRAINED_WEIGHTS if "draft" in of_kind else LEARNING_RATE
    return SETTINGS[settings.drafter](
        target=target,
        output=output,
        seed=settings.seed,
        text=text,
        steps=settings.steps,
        rows=settings.rows,
        length=settings.length,
        depth=1 if settings.drafter == "model" else settings.depth or usual_depth,
        learning_rate=settings.learning_rate or usual_rate,
        patience=settings.patience,
        save_every=settings.measure_every,
        measure_every=settings.measure_every,
        **of_kind,
    )


def trainee_of(settings: TrainingSettings, target: FrozenTarget) -> Trainee:
    """Returns the trainee. Raises ValueError if its draft does not fit the target."""
    match settings:
        case ModelTrainingSettings():
            return ModelTrainee(settings, target)
        case ParallelSettings():
            return ParallelTrainee(settings, target)
        case Eagle3Settings():
            return Eagle3Trainee(settings, target)
        case DFlashSettings():
            return DFlashTrainee(settings, target)
    return MedusaTrainee(settings, target)
