"""What a check has found. Whatever makes two deployments different is a reason, a sentence."""

from dataclasses import asdict, dataclass
from typing import Any

from workshop.checking.lm_eval import TaskMetric
from workshop.checking.settings import CheckSettings
from workshop.checking.side_by_side import AnswerDifference
from workshop.checking.two_sample import TwoSampleTest


@dataclass(frozen=True)
class KindCount:
    """Of the requests of one kind."""

    kind: str
    requests: int
    identical: int


@dataclass(frozen=True)
class Seeded:
    """Seeded requests side by side."""

    kinds: tuple[KindCount, ...]
    tokens: int  # compared: up to where answers part
    mean_rounding: float  # difference of a token's log-probability, nats
    largest_rounding: float
    near_ties: int
    near_ties_p_value: float  # of at least as many, by rounding alone
    differences: tuple[AnswerDifference, ...]
    reasons: tuple[str, ...]

    @property
    def requests(self) -> int:
        return sum(count.requests for count in self.kinds)

    @property
    def identical(self) -> int:
        return sum(count.identical for count in self.kinds)


@dataclass(frozen=True)
class Distributions:
    """Texts drawn under other seeds at each deployment."""

    prompts: int
    samples: int  # of each prompt, at each deployment
    tokens: int  # of each text
    temperature: float
    verification: str
    test: TwoSampleTest
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Perplexity:
    """Of one text at both."""

    texts: int  # pieces of it
    tokens: int
    a: float
    b: float
    mean_difference: float  # of a token's log-probability, nats, without its sign
    largest_difference: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Tasks:
    """Tasks of lm-eval."""

    metrics: tuple[TaskMetric, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One of the two."""

    name: str  # "A" or "B"
    url: str
    model: str
    speculation: str  # mode that requests asked for


@dataclass(frozen=True)
class CheckReport:
    """All parts that were asked for."""

    sides: tuple[Side, Side]
    settings: CheckSettings
    seconds: float
    seeded: Seeded | None = None
    distributions: Distributions | None = None
    perplexity: Perplexity | None = None
    tasks: Tasks | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Of all parts."""
        parts = (self.seeded, self.distributions, self.perplexity, self.tasks)
        return tuple(reason for part in parts if part is not None for reason in part.reasons)

    @property
    def differs(self) -> bool:
        return bool(self.reasons)

    def as_json(self) -> dict[str, Any]:
        return {
            "verdict": "differs" if self.differs else "same",
            "reasons": self.reasons,
            **asdict(self),
            "settings": self.settings.model_dump(mode="json"),
        }
