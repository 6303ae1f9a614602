"""Findings about each candidate, and which candidate is best."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean

from outrider.drafters.registry import Place
from outrider.pace.experts import NO_EXPERTS, ExpertsRead
from workshop.advice.judged import Counts
from workshop.advice.speed import FASTER, MIN_ACCEPTANCE, Expected, ExpectedCosts

PAYS = 1.02  # speedup over plain decoding; slower candidates are not recommended


@dataclass(frozen=True)
class Finding:
    """Finding about one candidate, on the answers of one task at one temperature."""

    task: str
    temperature: float
    by_depth: dict[int, Counts]
    expected: tuple[Expected, ...]  # [streams]

    @property
    def deepest(self) -> Counts:
        """Counts of the deepest rounds, which cover the most positions."""
        return self.by_depth[max(self.by_depth)]


@dataclass(frozen=True)
class Judgement:
    """Judgement of one candidate: its costs and its findings."""

    name: str
    drafter: str
    place: Place
    costs: ExpectedCosts
    target_cache: int  # bytes
    draft_memory: int  # bytes
    findings: tuple[Finding, ...]
    dollars: tuple[float | None, ...] = ()  # [streams] dollars per million tokens, over all findings

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of the draft model for one stream; None: the drafter has no model."""
        return None if self.costs.draft is None else self.costs.draft.seconds(1, 1)

    @property
    def times_faster(self) -> float | None:
        """Seconds of a target step / seconds of a draft step; None: the drafter has no model."""
        return None if self.step_s is None else self.costs.target.seconds(1, 1) / self.step_s

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate over all findings: accepted / reached."""
        reached = sum(sum(finding.deepest.reached) for finding in self.findings)
        accepted = sum(sum(finding.deepest.accepted) for finding in self.findings)
        return accepted / reached if reached else 0.0

    def speedup(self, stream: int) -> float:
        """Geometric mean of the speedup over tasks and temperatures.

        stream: index into ``Advice.streams``.
        """
        return exp(fmean(log(finding.expected[stream].speedup) for finding in self.findings))

    @property
    def score(self) -> float:
        """Score that ranks the candidate: geometric mean of the speedup over all numbers of streams."""
        return exp(fmean(log(self.speedup(stream)) for stream in range(len(self.findings[0].expected))))

    @property
    def warnings(self) -> list[str]:
        """Rules of thumb that the candidate breaks."""
        said = []
        if self.times_faster is not None and self.times_faster <= FASTER:
            said.append(f"only {self.times_faster:.1f} times faster than the target, not {FASTER:.0f}")
        if self.acceptance_rate < MIN_ACCEPTANCE:
            said.append(f"acceptance {self.acceptance_rate:.2f}, below {MIN_ACCEPTANCE}")
        return said


@dataclass
class Advice:
    """Advice on one target."""

    target: str
    streams: tuple[int, ...]
    is_measured: bool  # steps were measured on this machine; False: computed from data sheets
    step_ms: float  # milliseconds of a target step with one stream and one token
    dollars: tuple[float | None, ...]  # [streams] dollars per million tokens in plain decoding
    experts: ExpertsRead = NO_EXPERTS  # experts that steps of the target read, counted on this machine
    judgements: list[Judgement] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # reasons by candidate

    @property
    def ranking(self) -> list[Judgement]:
        """Judgements, the best first."""
        return sorted(self.judgements, key=lambda judgement: -judgement.score)

    @property
    def recommendation(self) -> str:
        """Recommendation in one sentence."""
        if not self.judgements:
            return "Stay with plain decoding: no candidate can draft for this target."
        best = self.ranking[0]
        if best.score < PAYS:
            return f"Stay with plain decoding: the best candidate, {best.name}, is not faster."
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
