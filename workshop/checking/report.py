"""Report of a check. Each reason why the deployments count as different is a sentence."""

from dataclasses import asdict, dataclass
from typing import Any

from workshop.checking.lm_eval import TaskMetric
from workshop.checking.paired import Paired
from workshop.checking.settings import CheckSettings
from workshop.checking.side_by_side import AnswerDifference
from workshop.checking.two_sample import TwoSampleTest


@dataclass(frozen=True)
class KindCount:
    """Count of the requests of one kind."""

    kind: str
    requests: int
    identical: int


@dataclass(frozen=True)
class Seeded:
    """Result of seeded requests."""

    kinds: tuple[KindCount, ...]
    tokens: int  # tokens that were compared, up to the first difference of each answer
    mean_rounding: float  # nats, mean difference of a token's log-probability
    largest_rounding: float
    near_ties: int
    near_ties_p_value: float  # probability of at least as many near-ties by rounding alone
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
    """Result of texts that are drawn with different seeds at the two deployments."""

    prompts: int
    samples: int  # texts of each prompt at each deployment
    tokens: int  # tokens of each text
    temperature: float
    verification: str
    test: TwoSampleTest
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one text at both deployments."""

    texts: int  # pieces of the text
    tokens: int
    a: float
    b: float
    mean_difference: float  # nats, mean absolute difference of a token's log-probability
    largest_difference: float
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Tasks:
    """Result of lm-eval's tasks."""

    metrics: tuple[TaskMetric, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One of the two deployments."""

    name: str  # "A" or "B"
    url: str
    model: str
    speculation: str  # mode that requests ask for


@dataclass(frozen=True)
class CheckReport:
    """Report with the requested parts."""

    sides: tuple[Side, Side]
    settings: CheckSettings
    seconds: float
    seeded: Seeded | None = None
    distributions: Distributions | None = None
    perplexity: Perplexity | None = None
    tasks: Tasks | None = None
    paired: Paired | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of all parts."""
        parts = (self.seeded, self.distributions, self.perplexity, self.tasks, self.paired)
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
