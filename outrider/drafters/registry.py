"""Table of all drafters, for settings, command line, page, pace and documentation.

A drafter consists of a file and a row. The place of the drafter determines what the file contains:

- gateway: an ``Index`` (outrider/drafters/index.py), which guesses from the tokens of its own sequence. If it
  ``remembers``, it also guesses from past answers (outrider/drafters/past_answers.py). If it
  ``reads_prediction``, it guesses from what the request predicts, and no request or setting names it.
- draft worker: a ``TaskDrafter`` (outrider/engine/draft_ahead/task_drafter.py), which makes the tasks of
  the engine. A setting names the row; the default is ``parallel`` for a checkpoint with a mask token, else
  ``model``.
- target worker: a ``TargetDrafter`` (outrider/engine/drafters/target_drafter.py), which reads the target's
  states.
"""

from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Any


class Place(Enum):
    """Place at which a drafter runs. Rounds and pace never test it, but attributes of ``DrafterInfo``."""

    GATEWAY = "gateway"
    DRAFT_WORKER = "draft worker"
    TARGET_WORKER = "target worker"


class Width(Enum):
    """Nodes that Drafts may hold next to a chain."""

    CHAIN = "nothing"
    ALTERNATIVES = "alternatives, which cost it nothing"
    TREE = "a tree, whose nodes it feeds like the chain"
    FREE_TREE = "a tree, whose nodes cost it nothing"


@dataclass(frozen=True)
class DrafterInfo:
    """Row of a drafter, whose Draft takes ``steps_per_draft + depth * steps_per_token`` steps of its model.

    A step feeds one token of each sequence, or all positions of their Drafts if the drafter is parallel.
    """

    name: str
    meaning: str
    place: Place
    implementation: str  # module:class or module:function
    steps_per_draft: float = 0.0
    steps_per_token: float = 0.0
    is_parallel: bool = False
    width: Width = Width.CHAIN
    remembers: bool = False  # its index is given past answers
    reads_prediction: bool = False  # its index is given the request's prediction
    mixes: tuple[str, ...] | None = None  # drafter and indices that are combined; None: a single drafter

    @property
    def has_trees(self) -> bool:
        """Whether its Drafts continue their alternatives with further tokens."""
        return self.width in (Width.TREE, Width.FREE_TREE)

    @property
    def is_united(self) -> bool:
        """Whether the target merges the mixed Drafts into one; else the gateway picks one drafter's Draft."""
        return self.mixes is not None and self.place is Place.TARGET_WORKER

    @property
    def asked(self) -> str:
        """Name of the drafter that the draft worker or the target has loaded."""
        return self.mixes[0] if self.mixes else self.name

    @property
    def asks_worker(self) -> bool:
        """Whether a draft worker makes its Drafts. The worker must be ready, and must read the text first."""
        return self.place is Place.DRAFT_WORKER

    @property
    def is_index(self) -> bool:
        """Whether it guesses from known text alone, at almost no cost and without a worker that can fail."""
        return self.place is Place.GATEWAY

    @property
    def comes_with_verdicts(self) -> bool:
        """Whether the target sends its Drafts, each with a Verdict."""
        return self.place is Place.TARGET_WORKER

    @property
    def probes_by_rounds(self) -> bool:
        """Whether a probe costs a round: the target makes no Draft for a sequence in plain decoding."""
        return self.place is Place.TARGET_WORKER

    @property
    def waits_in_step(self) -> bool:
        """Whether all sequences of a target's step wait while it drafts for a few sequences."""
        return self.place is Place.TARGET_WORKER

    def load(self) -> Any:
        """Returns the class or function that makes the drafter, imported on first use: some need torch."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)


_ROWS: dict[str, DrafterInfo] = {}


def register(*rows: DrafterInfo) -> None:
    """Adds drafters. Raises ValueError if a name is taken."""
    for row in rows:
        if row.name in _ROWS:
            raise ValueError(f"there is a drafter named {row.name!r} already")
        _ROWS[row.name] = row


def mixed(name: str, index: str = "suffix", *more: str) -> DrafterInfo:
    """Returns the row that combines a drafter with a scored index.

    The target merges the Drafts of a target drafter with the guesses of the index and of ``more`` indices.
    For any other drafter, the gateway takes the index's Draft if it promises more tokens.
    """
    row = drafter(name)
    mixes = (name, index, *more)
    united = row.place is Place.TARGET_WORKER
    meaning = (
        f"{' and '.join(mixes)} in one tree" if united else f"{index} if it promises more tokens, else {name}"
    )
    return replace(row, name="+".join(mixes), meaning=meaning, mixes=mixes)


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the name of the drafter, and the names of its indices if it is a mixed drafter."""
    other, *indices = name.split("+")
    return other, tuple(indices)


def drafters() -> tuple[DrafterInfo, ...]:
    """Returns all rows, in the order in which they were added."""
    return tuple(_ROWS.values())


def drafter(name: str) -> DrafterInfo:
    """Returns the row of that name. Raises ValueError naming all drafters."""
    if name not in _ROWS:
        raise ValueError(f"there is no drafter {name!r}, there are: {', '.join(_ROWS)}")
    return _ROWS[name]


def row_of(setting: str) -> DrafterInfo:
    """Returns the row that a setting names, by row name or as ``module:NAME``, which is then registered.

    Raises:
        ValueError: there is no such row.
    """
    module, colon, name = setting.partition(":")
    if not colon:
        return drafter(setting)
    try:
        row = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{setting!r} names no row: {error}") from None
    if not isinstance(row, DrafterInfo):
        raise ValueError(f"{setting!r} must be a DrafterInfo, and is a {type(row).__name__}")
    if _ROWS.get(row.name) is not row:
        register(row)
    return row


register(
    DrafterInfo(
        "model",
        "a smaller model with the target's vocabulary, in a worker of its own",
        Place.DRAFT_WORKER,
        "outrider.engine.draft_ahead.task_drafter:TokenByToken",
        steps_per_draft=0.5,  # a sequence waits half a step for the draft's own batch
        steps_per_token=1.0,
        width=Width.ALTERNATIVES,
    ),
    DrafterInfo(
        "parallel",
        "a smaller model that drafts all its tokens in one pass, in a worker of its own",
        Place.DRAFT_WORKER,
        "outrider.engine.draft_ahead.task_drafter:InOnePass",
        steps_per_draft=1.5,  # one step, and half a step of waiting
        is_parallel=True,
        width=Width.ALTERNATIVES,
    ),
    DrafterInfo(
        "ngram",
        "what followed the newest tokens at an earlier occurrence, in prompt or answer",
        Place.GATEWAY,
        "outrider.drafters.ngram:NgramIndex",
    ),
    DrafterInfo(
        "suffix",
        "what followed the newest tokens at earlier occurrences of any length, also in past answers",
        Place.GATEWAY,
        "outrider.drafters.suffix:SuffixIndex",
        remembers=True,
    ),
    DrafterInfo(
        "prediction",
        "what the request predicts of its answer, from the place that the answer has reached",
        Place.GATEWAY,
        "outrider.drafters.prediction:PredictionIndex",
        reads_prediction=True,
    ),
    DrafterInfo(
        "colocated",
        "a smaller model with the target's vocabulary, in the target's process and on its device",
        Place.TARGET_WORKER,
        "outrider.engine.colocated.colocated:Colocated",
        steps_per_token=1.0,
        width=Width.ALTERNATIVES,
    ),
    DrafterInfo(
        "medusa",
        "heads over the target's last state, one for each position, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.medusa:Medusa",
        steps_per_draft=1.0,
        width=Width.TREE,
    ),
    DrafterInfo(
        "eagle3",
        "an EAGLE-3 head, which reads three layers of the target, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.eagle3:Eagle3",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
    DrafterInfo(
        "peagle",
        "a P-EAGLE head, which guesses several tokens in one pass, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.peagle:PEagle",
        steps_per_draft=1.0,
        width=Width.FREE_TREE,
    ),
    DrafterInfo(
        "dflash",
        "a draft of DFlash, DFlash2 or DSpark, which guesses a block in one pass, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.dflash:DFlash",
        steps_per_draft=1.0,
        width=Width.FREE_TREE,
    ),
    DrafterInfo(
        "assistant",
        "Gemma 4's assistant, which reads the target's own cache, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.assistant:Assistant",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
    DrafterInfo(
        "mtp",
        "the layers for multi-token prediction that the target's checkpoint carries, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.mtp_layers:mtp_drafter",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
    DrafterInfo(
        "early_exit",
        "the target's first layers, or the target without some layers, with the target's norm and head",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.early_exit:EarlyExit",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
)
register(mixed("model"), mixed("parallel"))
