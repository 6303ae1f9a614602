"""Drafters that stand beside the target: they read the states of its layers and draft as a Verdict falls."""

from abc import abstractmethod
from typing import Any, Protocol

from outrider.drafters.registry import Place, drafter
from outrider.engine.drafters.drafter import Drafter
from outrider.engine.settings import EngineSettings


class Target(Protocol):
    """The target that it stands beside, once that is loaded."""

    model: Any
    settings: EngineSettings  # those in force


class BesideTarget(Drafter):
    """It is made before the target, from its checkpoint's config alone, and loaded after it."""

    hidden_layers: tuple[int, ...] = ()  # of the target, whose states it is given; -1 is the last
    weight_bytes = 0  # that it adds to the target's

    def __init__(self, settings: EngineSettings) -> None:
        """
        Args:
            settings: of the target.

        Raises:
            UnsupportedModelError: it belongs to another target, or cannot stand beside this one.
        """
        assert settings.drafter is not None
        self._info = drafter(settings.drafter)
        self._name = settings.head or settings.drafter

    def __str__(self) -> str:
        return f"drafter={self._info.name!r} from {self._name!r}"

    def steps(self, depth: int) -> float:
        """Of its own, that a Draft of this depth takes."""
        return self._info.steps_per_draft + depth * self._info.steps_per_token or 1.0

    @abstractmethod
    def load(self, target: Target) -> None:
        """Its weights, onto the target's device and in its type. Raises UnsupportedModelError."""


def beside_target(settings: EngineSettings) -> BesideTarget | None:
    """The drafter that the settings name, None where they name none.

    Raises:
        ValueError: it does not run beside a target.
        UnsupportedModelError: as ``BesideTarget``.
    """
    if settings.drafter is None:
        return None
    info = drafter(settings.drafter)
    if info.place is not Place.TARGET_WORKER:
        raise ValueError(f"drafter={settings.drafter!r} runs in the {info.place.value}, not beside a target")
    made: BesideTarget = info.load()(settings)
    return made
