"""Figure of the advice: the speedup of candidates by load, and their acceptance by position."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from workshop.advice.advice import Advice, Judgement

DRAWN = 8  # most candidates that are drawn, the best first


def draw(advice: Advice, file: Path) -> None:
    """Writes the picture; the file's suffix gives its format."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    speed, acceptance = figure.subplots(1, 2)
    _draw_speed(speed, advice)
    _draw_acceptance(acceptance, advice.ranking[:DRAWN])
    figure.suptitle(f"{advice.target}\n{advice.recommendation}", fontsize=9, wrap=True)
    figure.savefig(file, dpi=110)


def _draw_speed(axes: Axes, advice: Advice) -> None:
    axes.set_title("times plain decoding, expected", fontsize=11)
    for judgement in advice.ranking[:DRAWN]:
        speeds = [judgement.speedup(index) for index in range(len(advice.streams))]
        axes.plot(advice.streams, speeds, "o-", label=judgement.name, markersize=4)
    axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(advice.streams)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("streams")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_acceptance(axes: Axes, judgements: list[Judgement]) -> None:
    """Draws accepted / reached by position, over all tasks and temperatures."""
    axes.set_title("acceptance rate by position", fontsize=11)
    for judgement in judgements:
        positions, rates = [], []
        for position in range(max(finding.deepest.depth for finding in judgement.findings)):
            reached = sum(finding.deepest.reached[position] for finding in judgement.findings)
            if reached:
                accepted = sum(finding.deepest.accepted[position] for finding in judgement.findings)
                positions.append(position + 1)
                rates.append(accepted / reached)
        axes.plot(positions, rates, "o-", label=judgement.name, markersize=4)
    axes.set_ylim(0.0, 1.0)
    axes.set_xlabel("position in the Draft")
    axes.grid(alpha=0.3)
