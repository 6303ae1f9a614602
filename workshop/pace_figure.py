"""Draws the figure of docs/pace.md and prints its example's numbers: ``python -m workshop.pace_figure``.

The target takes 20 ms to read its weights. Up to 32 tokens are computed meanwhile; each further token takes
0.4 ms. The draft takes 2 ms per token. All decisions are made by the pace's own functions.
"""

from pathlib import Path

import numpy as np

from outrider.pace.optimizer import best_depths, log_rate, mix_of, round_seconds
from outrider.pace.regression import Vector

FIGURE = Path(__file__).parents[1] / "docs" / "pace.png"
MAX_DEPTH = 8  # tokens
RATE = 0.8  # acceptance rate at every position
LOADS = (1, 8, 16, 32, 64)  # sequences


class ExampleCosts:
    """Costs of the example's target and draft."""

    calibration = plain_factor = 1.0
    draft_in_step = False

    def step(self, sequences: Vector, tokens: Vector) -> Vector:
        return 20e-3 + 0.4e-3 * np.maximum(np.asarray(tokens) - 32.0, 0.0)

    def drafting(
        self, sequences: Vector, depth: Vector, alternatives: Vector | float, target_step: Vector
    ) -> Vector:
        """Returns the seconds of half a step of waiting, one step per token, and 1 ms for messages."""
        return 1e-3 + 2e-3 * (np.asarray(depth) + 0.5)


def reach(rate: float, sequences: int) -> Vector:
    """Returns the probability that each position is accepted, [sequences, MAX_DEPTH]."""
    return np.tile(rate ** np.arange(1.0, MAX_DEPTH + 1.0), (sequences, 1))


def chosen(rate: float, sequences: int) -> float:
    """Returns the mean depth that the pace chooses for a number of identical sequences."""
    is_batch = np.zeros(sequences, bool)
    return float(best_depths(reach(rate, sequences), is_batch, ExampleCosts()).mean())


def by_depth() -> list[str]:
    """Returns the rows of the page's first table: one sequence, every depth."""
    rows = []
    for depth in range(MAX_DEPTH + 1):
        likely = reach(RATE, 1)
        mix = mix_of(np.array([depth]), likely, ExampleCosts())
        round_s, plain_s = round_seconds(mix, ExampleCosts())
        seconds = float(round_s if depth else plain_s)
        rate = float(np.exp(log_rate(mix, ExampleCosts())))
        share = f"{likely[0, :depth].mean():.0%}" if depth else ""
        tokens = 1.0 + likely[0, :depth].sum()
        rows.append(f"| {depth} | {tokens:.2f} | {1e3 * seconds:.0f} ms | {rate:.0f} | {share} |")
    return rows


def by_load() -> list[str]:
    """Returns the rows of the page's second table: the mean chosen depth by load and acceptance."""
    return [
        f"| {load} | " + " | ".join(f"{chosen(rate, load):.1f}" for rate in (0.5, 0.8, 0.95)) + " |"
        for load in LOADS
    ]


def draw(path: Path) -> None:
    """Draws the cost curve, the acceptance curve and the chosen depth next to each other."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (cost, tokens, depth) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    sizes = np.arange(1.0, 257.0)
    cost.plot(sizes, 1e3 * ExampleCosts().step(sizes, sizes))
    cost.set(
        title="Cost of a target step", xlabel="tokens in the step", ylabel="milliseconds", ylim=(0, None)
    )
    depths = np.arange(MAX_DEPTH + 1)
    loads = np.unique(np.geomspace(1, 128, 24).astype(int))
    for rate in (0.5, 0.8, 0.95):
        label = f"acceptance rate {rate}"
        tokens.plot(depths, np.cumsum([1.0, *reach(rate, 1)[0]]), marker="o", label=label)
        depth.plot(loads, [chosen(rate, int(load)) for load in loads], marker=".", label=label)
    tokens.set(title="Tokens of a round", xlabel="drafted tokens", ylabel="expected tokens", ylim=(0, None))
    depth.set(title="Chosen depth", xlabel="sequences", ylabel="drafted tokens", xscale="log")
    tokens.legend()
    figure.savefig(path, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    draw(FIGURE)
    print("\n".join([*by_depth(), "", *by_load()]))
