"""Candidates: drafters that could draft for a target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from cluster.groups import DEFAULT_DRAFT, DraftSettings
from cluster.settings import COLOCATED, Settings
from outrider.drafters.registry import DrafterInfo, Place, drafter
from outrider.engine.drafters.early_exit import EarlyExit
from outrider.engine.drafters.target_drafter import target_drafter
from outrider.engine.loading.special_tokens import drafts_in_parallel
from outrider.engine.loading.vocabulary import check_vocabulary
from outrider.engine.settings import EngineSettings, Quantization, TargetDrafterSettings

EARLY_EXIT = "early_exit"  # drafter that needs no checkpoint
FORMS: tuple[Quantization | None, ...] = (None, "int8", "int4")


@dataclass(frozen=True)
class DraftCandidate:
    """Drafter with its checkpoint and its options."""

    name: str
    info: DrafterInfo
    model: str | None = None  # checkpoint of a worker drafter
    quantization: Quantization | None = None
    checkpoint: str | None = None  # checkpoint of a target drafter, if it has one
    layers: int | None = None  # number of the target's first layers that draft

    def settings(self, given: Settings) -> Settings:
        """Returns the settings of a deployment with this drafter."""
        drafters = {}
        if self.info.place is Place.TARGET_WORKER:
            own = given.target.drafters.get(self.info.name, TargetDrafterSettings())
            change: dict[str, Any] = {"checkpoint": self.checkpoint}
            if self.layers is not None:
                change |= {"layers": self.layers, "skipped_layers": ()}
            drafters = {self.info.name: own.model_copy(update=change)}
        target = given.target.model_copy(update={"drafters": drafters})
        drafts = {} if self.model is None else {draft_name(given): self._draft(given)}
        return given.model_copy(update={"target": target, "drafts": drafts})

    def _draft(self, given: Settings) -> DraftSettings:
        assert self.model is not None
        of_config = next((draft for draft in given.drafts.values() if draft.model == self.model), None)
        like = given.target if self.model == given.target.model else of_config
        dtype = "auto" if like is None else like.dtype
        usual = DraftSettings(model=self.model, gpus=min(given.target.gpus or 0.0, 1.0))
        draft = given.drafts.get(draft_name(given), usual)
        change = {"model": self.model, "quantization": self.quantization, "dtype": dtype}
        return draft.model_copy(update=change)

    def draft_engine(self, given: Settings) -> EngineSettings:
        """Returns the settings of a draft engine without draft-ahead."""
        return self.settings(given).draft_engine(draft_name(given)).model_copy(update={"draft_ahead": 0})

    def target_engine(self, given: Settings) -> EngineSettings:
        """Returns the settings of the target with its drafter."""
        return self.settings(given).target_engine()


def draft_name(settings: Settings) -> str:
    """Returns the name of the draft in the settings that candidates replace."""
    return next(iter(settings.drafts), DEFAULT_DRAFT)


def candidates(
    settings: Settings, models: Sequence[str], heads: Mapping[str, str]
) -> Iterator[DraftCandidate]:
    """Yields all candidates: from the settings, from the options, and drafters that need no checkpoint.

    Args:
        models: folders or hub ids, in addition to the drafts of the settings.
        heads: checkpoints by target drafter, in addition to the settings; for ``early_exit`` a number of
            layers.

    Raises:
        ValueError: a model does not exist, or a name in ``heads`` is not a target drafter.
        UnsupportedModelError: the target's own layers cannot draft.
    """
    target = settings.target
    colocated = target.drafters.get(COLOCATED)
    beside = [colocated.checkpoint] if colocated is not None and colocated.checkpoint else []
    named = dict.fromkeys([*(draft.model for draft in settings.drafts.values()), *beside, *models])
    labels = _labels([model for model in named if model != target.model])
    for model, label in labels.items():
        for form in _forms(model):
            yield DraftCandidate(_with_form(label, form), drafter("model"), model, form)
        yield DraftCandidate(f"{label} + suffix", drafter("model+suffix"), model)
    for form in _forms(target.model)[1:]:
        yield DraftCandidate(_with_form("the target", form), drafter("model"), target.model, form)
    yield DraftCandidate("ngram", drafter("ngram"))
    yield DraftCandidate("suffix", drafter("suffix"))
    for name, own in target.drafters.items():
        if name != COLOCATED:
            yield from _target_drafters(settings, name, own.checkpoint)
    for name, head in heads.items():
        yield from _target_drafters(settings, name, head)


def _target_drafters(settings: Settings, name: str, head: str | None) -> Iterator[DraftCandidate]:
    """Yields the candidates of a target drafter. Raises ValueError for other kinds of drafters."""
    info = drafter(name)
    if info.place is not Place.TARGET_WORKER:
        raise ValueError(f"{name}={head}: {name!r} is no target drafter")
    if name != EARLY_EXIT:
        yield DraftCandidate(name, info, checkpoint=head)
    elif head is not None and head.isdecimal():
        yield DraftCandidate(f"{EARLY_EXIT} {head}", info, layers=int(head))
    else:
        yield from _exits(settings, head)


def _exits(settings: Settings, head: str | None) -> Iterator[DraftCandidate]:
    """Yields the early exit that the settings name, or else every early exit made of the first layers."""
    info = drafter(EARLY_EXIT)
    given = DraftCandidate(EARLY_EXIT, info, checkpoint=head)
    made = target_drafter(given.target_engine(settings), EARLY_EXIT)
    assert isinstance(made, EarlyExit)
    if len(made.candidates) == 1:
        yield given
        return
    for layers in made.candidates:
        if layers == tuple(range(len(layers))):
            yield DraftCandidate(f"{EARLY_EXIT} {len(layers)}", info, checkpoint=head, layers=len(layers))


def checked(candidate: DraftCandidate, target: str) -> DraftCandidate:
    """Returns the candidate as it would be served: a parallel draft model gets the parallel drafter.

    Raises:
        VocabularyMismatchError: the model does not share the target's tokenizer.
    """
    if candidate.model is None or candidate.model == target:
        return candidate
    check_vocabulary(target, candidate.model)
    if not drafts_in_parallel(candidate.model):
        return candidate
    name = candidate.info.name.replace("model", "parallel")
    return DraftCandidate(candidate.name, drafter(name), candidate.model, candidate.quantization)


def _forms(model: str) -> tuple[Quantization | None, ...]:
    """Returns the quantizations to try, None included. Raises ValueError if the model does not exist."""
    try:
        AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"{model!r} is no model that can draft: {error}") from None
    return FORMS


def _with_form(label: str, form: Quantization | None) -> str:
    return label if form is None else f"{label} {form}"


def _labels(models: Sequence[str]) -> dict[str, str]:
    """Returns a label for each model: the last part of its path, or the whole path to be unique."""
    ends = [Path(model).name for model in models]
    return {model: end if ends.count(end) == 1 else model for model, end in zip(models, ends, strict=True)}
