"""Every drafter that there is. Settings, command line, page, pace and documentation read it here.

A drafter is a file and a row. Where it runs says what its file holds:

- gateway: an ``Index`` (outrider/drafters/index.py), which guesses from the tokens of its own sequence, and
  where it ``remembers``, from past answers too (outrider/drafters/past_answers.py).
- draft worker: a ``TaskDrafter`` (outrider/engine/draft_ahead/task_drafter.py), which makes the tasks of
  the engine. A setting names the row; without it, ``parallel`` holds for a checkpoint with a mask token,
  else ``model``.
- target worker: a ``TargetDrafter`` (outrider/engine/drafters/target_drafter.py), which reads its states.
"""

from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from typing import Any


class Place(Enum):
    """Where a drafter runs: says what its file holds. Rounds and pace read the facts of ``DrafterInfo``."""

    GATEWAY = "gateway"
    DRAFT_WORKER = "draft worker"
    TARGET_WORKER = "target worker"


class Width(Enum):
    """Nodes that its Drafts may hold next to a chain."""

    CHAIN = "nothing"
    ALTERNATIVES = "alternatives, which cost it nothing"
    TREE = "a tree, whose nodes it feeds as it does the chain's"


@dataclass(frozen=True)
class DrafterInfo:
    """One row. A Draft takes ``steps_per_draft + depth * steps_per_token`` steps of its own model.

    A step feeds one token of each sequence, or where it is parallel all positions of their Drafts.
    """

    name: str
    meaning: str
    place: Place
    implementation: str  # module:class
    steps_per_draft: float = 0.0
    steps_per_token: float = 0.0
    is_parallel: bool = False
    width: Width = Width.CHAIN
    remembers: bool = False  # its index is given past answers
    mixes: tuple[str, str] | None = (
        None  # a drafter, and an index whose Draft is taken where it promises more
    )

    @property
    def asked(self) -> str:
        """Name of the drafter that its worker or its target is asked for."""
        return self.mixes[0] if self.mixes else self.name

    @property
    def asks_worker(self) -> bool:
        """Whether a draft worker makes its Drafts: it has to be ready, and to take the text in first."""
        return self.place is Place.DRAFT_WORKER

    @property
    def is_index(self) -> bool:
        """Whether it looks into text that is there: a guess costs next to nothing, and no worker is lost."""
        return self.place is Place.GATEWAY

    @property
    def comes_with_verdicts(self) -> bool:
        """Whether the target sends its Drafts, each with a Verdict; a mixed drafter has others too."""
        return self.place is Place.TARGET_WORKER

    @property
    def probes_by_rounds(self) -> bool:
        """Whether a probe costs a round: the target makes no Draft for a sequence in plain decoding."""
        return self.place is Place.TARGET_WORKER

    @property
    def waits_in_step(self) -> bool:
        """Whether all sequences of a step of the target wait while it drafts for a few of them."""
        return self.place is Place.TARGET_WORKER

    def load(self) -> Any:
        """The class, imported where it is used: some need torch."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)


_ROWS: dict[str, DrafterInfo] = {}


def register(*rows: DrafterInfo) -> None:
    """Adds drafters. Raises ValueError if a name is taken."""
    for row in rows:
        if row.name in _ROWS:
            raise ValueError(f"there is a drafter named {row.name!r} already")
        _ROWS[row.name] = row


def mixed(name: str, index: str) -> DrafterInfo:
    """The row of a drafter that gives way to an index with a score, where that promises more tokens."""
    meaning = f"{index} where that promises more tokens, {name} where not"
    return replace(drafter(name), name=f"{name}+{index}", meaning=meaning, mixes=(name, index))


def drafters() -> tuple[DrafterInfo, ...]:
    """All rows, in the order in which they were added."""
    return tuple(_ROWS.values())


def drafter(name: str) -> DrafterInfo:
    """Raises ValueError naming those that there are."""
    if name not in _ROWS:
        raise ValueError(f"there is no drafter {name!r}, there are: {', '.join(_ROWS)}")
    return _ROWS[name]


def row_of(setting: str) -> DrafterInfo:
    """Returns the row that a setting names: by its name, or as ``module:NAME``, which is registered then.

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
        steps_per_draft=1.5,  # one, and half a step of waiting
        is_parallel=True,
        width=Width.ALTERNATIVES,
    ),
    DrafterInfo(
        "ngram",
        "what followed the newest tokens where they occurred before, in prompt or answer",
        Place.GATEWAY,
        "outrider.drafters.ngram:NgramIndex",
    ),
    DrafterInfo(
        "suffix",
        "what followed the newest tokens before, by all lengths of them: in prompt, answer and past answers",
        Place.GATEWAY,
        "outrider.drafters.suffix:SuffixIndex",
        remembers=True,
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
        "mtp",
        "the layer for multi-token prediction that the target's checkpoint carries, in the target worker",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.mtp:Mtp",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
    DrafterInfo(
        "early_exit",
        "the target's first layers, or the target without some of its layers, with its own norm and head",
        Place.TARGET_WORKER,
        "outrider.engine.drafters.early_exit:EarlyExit",
        steps_per_token=1.0,
        width=Width.TREE,
    ),
)
register(mixed("model", "suffix"), mixed("parallel", "suffix"))
