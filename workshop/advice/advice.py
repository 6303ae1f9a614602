"""What is found out about each candidate, and which is best."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean

from outrider.drafters.registry import Place
from workshop.advice.judged import Counts
from workshop.advice.speed import FASTER, LEAST_ACCEPTANCE, Expected, ExpectedCosts

PAYS = 1.02  # times plain decoding, from which on a candidate is recommended


@dataclass(frozen=True)
class Finding:
    """One candidate on the answers of one task at one temperature."""

    task: str
    temperature: float
    by_depth: dict[int, Counts]
    expected: tuple[Expected, ...]  # [streams]

    @property
    def deepest(self) -> Counts:
        """Rounds of the largest depth, which say most about positions."""
        return self.by_depth[max(self.by_depth)]


@dataclass(frozen=True)
class Judgement:
    """One candidate."""

    name: str
    drafter: str
    place: Place
    costs: ExpectedCosts
    target_cache: int  # bytes
    draft_memory: int  # bytes
    findings: tuple[Finding, ...]
    dollars: tuple[float | None, ...] = ()  # [streams] per million tokens, over all findings

    @property
    def step_s(self) -> float | None:
        """Of its model, one stream; None: guesses take no model."""
        return None if self.costs.draft is None else self.costs.draft.seconds(1, 1)

    @property
    def times_faster(self) -> float | None:
        """Than the target's step."""
        return None if self.step_s is None else self.costs.target.seconds(1, 1) / self.step_s

    @property
    def acceptance_rate(self) -> float:
        """Accepted / verified, over all findings."""
        verified = sum(sum(finding.deepest.verified) for finding in self.findings)
        accepted = sum(sum(finding.deepest.accepted) for finding in self.findings)
        return accepted / verified if verified else 0.0

    def speedup(self, stream: int) -> float:
        """Geometric mean over tasks and temperatures, at one of the numbers of streams, by index."""
        return exp(fmean(log(finding.expected[stream].speedup) for finding in self.findings))

    @property
    def score(self) -> float:
        """By which candidates are ranked: the geometric mean over all numbers of streams."""
        return exp(fmean(log(self.speedup(stream)) for stream in range(len(self.findings[0].expected))))

    @property
    def warnings(self) -> list[str]:
        """Where it breaks the rule of thumb."""
        said = []
        if self.times_faster is not None and self.times_faster <= FASTER:
            said.append(f"only {self.times_faster:.1f} times faster than the target, not {FASTER:.0f}")
        if self.acceptance_rate < LEAST_ACCEPTANCE:
            said.append(f"acceptance {self.acceptance_rate:.2f}, below {LEAST_ACCEPTANCE}")
        return said


@dataclass
class Advice:
    """On one target."""

    target: str
    streams: tuple[int, ...]
    is_measured: bool  # steps on this machine; False: by data sheets
    step_ms: float  # of the target, one stream, one token
    dollars: tuple[float | None, ...]  # [streams] per million tokens, of plain decoding
    judgements: list[Judgement] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # candidates, and why

    @property
    def ranking(self) -> list[Judgement]:
        """The best first."""
        return sorted(self.judgements, key=lambda judgement: -judgement.score)

    @property
    def recommendation(self) -> str:
        """One sentence."""
        if not self.judgements:
            return "Stay with plain decoding: no candidate can draft for this target."
        best = self.ranking[0]
        if best.score < PAYS:
            return f"Stay with plain decoding: the best candidate, {best.name}, brings nothing beside it."
        speeds = _listed(
            [f"{best.speedup(index):.2f} at {streams}" for index, streams in enumerate(self.streams)]
        )
        depths = sorted({expected.depth for finding in best.findings for expected in finding.expected})
        depth = f"depth {depths[0]}" if len(depths) == 1 else f"depths {depths[0]} to {depths[-1]}"
        but = f", though it is {' and has '.join(best.warnings)}" if best.warnings else ""
        return f"Take {best.name}: {depth}, expected {speeds} streams times plain decoding{but}."


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
