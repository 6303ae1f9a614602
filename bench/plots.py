"""Draws load.png and ahead.png beside the JSON in bench/results: `python -m bench plots`."""

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from bench.report import RESULTS

COLOURS = {"plain": "black", "adaptive": "tab:red"}
PARTS = {
    "target": "tab:blue",
    "draft": "tab:orange",
    "wait": "lightgrey",
    "wire": "tab:red",
    "gateway": "tab:green",
}
FIXED_COLOURS = ("tab:cyan", "tab:blue", "tab:purple", "tab:green")

Row = Mapping[str, Any]


def figure_of(results: Mapping[str, Any]) -> Figure:
    """Six panels over the number of streams."""
    rows = results["rows"]
    figure = Figure(figsize=(15, 9), layout="constrained")
    speed, ratio, first, per_token, depth, share = figure.subplots(2, 3).flat
    draw(speed, "tokens/s", rows, "tokens/s")
    draw_ratios(ratio, results["ratios"], [row for row in results["tasks"] if row["task"] == "creative"])
    draw(first, "time to first token, median, ms", rows, "first token p50, ms")
    draw(per_token, "time per output token, ms: median, dotted p99", rows, "per token p50, ms")
    draw(per_token, per_token.get_title(), rows, "per token p99, ms", "s:")
    draw(depth, "mean depth of the Drafts", rows, "mean depth")
    draw(share, "share of target passes with a Draft", rows, "share of passes with a Draft")
    for axes in (speed, first, per_token):
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(ScalarFormatter())
    for axes in (depth, share):
        axes.set_ylim(bottom=0)
    for axes in figure.axes:
        over_streams(axes, rows)
    speed.legend(fontsize=9)
    made = f"{results['commands']['closed']}, {results['machine']['processor']}, {results['date']}"
    figure.suptitle(textwrap.fill(made, 180), fontsize=9)
    return figure


def draw(axes: Axes, title: str, rows: Sequence[Row], column: str, style: str = "o-") -> None:
    """A line per mode, broken where the target changes."""
    axes.set_title(title, fontsize=11)
    colours = colours_of(rows)
    labelled = set()
    for mode, points in lines(rows, column):
        label = None if mode in labelled else mode
        labelled.add(mode)
        axes.plot(*zip(*points, strict=True), style, color=colours[mode], markersize=4, label=label)


def lines(rows: Sequence[Row], column: str) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Mode and points, for each mode and target; what was not measured is left out."""
    for mode, target in dict.fromkeys((row["mode"], row["target"]) for row in rows):
        points = [
            (row["streams"], row[column])
            for row in rows
            if (row["mode"], row["target"]) == (mode, target) and row[column] is not None
        ]
        if points:
            yield mode, points


def colours_of(rows: Sequence[Row]) -> dict[str, str]:
    fixed = [mode for mode in dict.fromkeys(row["mode"] for row in rows) if mode not in COLOURS]
    return {**COLOURS, **{mode: FIXED_COLOURS[i % len(FIXED_COLOURS)] for i, mode in enumerate(fixed)}}


def draw_ratios(axes: Axes, mixed: Sequence[Row], creative: Sequence[Row]) -> None:
    """Medians with their 90 % intervals; over each of the mixed ones the reference."""
    axes.set_title("adaptive / reference, 90 % interval", fontsize=11)
    for rows, label, colour, style in (
        (mixed, "mixed tasks, beside the best mode", COLOURS["adaptive"], "o"),
        (creative, "creative, beside plain", "tab:orange", "s"),
    ):
        if not rows:
            continue
        ratios = [row["adaptive / reference"] for row in rows]
        below = [max(0.0, ratio - row["low"]) for ratio, row in zip(ratios, rows, strict=True)]
        above = [max(0.0, row["high"] - ratio) for ratio, row in zip(ratios, rows, strict=True)]
        streams = [row["streams"] * (1.06 if rows is creative else 1.0) for row in rows]  # beside each other
        axes.errorbar(streams, ratios, [below, above], fmt=style, color=colour, capsize=3, label=label)
        axes.axhline(rows[0]["bar"], color="grey", linestyle="--", linewidth=1)
    for row in mixed:
        place: dict[str, Any] = {
            "xytext": (0, 4),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 8,
        }
        axes.annotate(row["reference"], (row["streams"], row["high"]), **place)
    axes.legend(fontsize=9)


def over_streams(axes: Axes, rows: Sequence[Row]) -> None:
    """A base-2 axis, and a line between the targets with their names beside it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["streams"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("streams")
    axes.grid(alpha=0.3)
    ranges = streams_by_target(rows)
    for (target, few), (larger_target, many) in itertools.pairwise(ranges):
        border = (few[-1] * many[0]) ** 0.5
        axes.axvline(border, color="grey", linewidth=1, linestyle=":")
        for name, side in ((f"{target} ", "right"), (f" {larger_target}", "left")):
            axes.text(border, 0.01, name, transform=axes.get_xaxis_transform(), ha=side, fontsize=8)


def streams_by_target(rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
    targets = dict.fromkeys(row["target"] for row in rows)
    return [
        (target, sorted({row["streams"] for row in rows if row["target"] == target})) for target in targets
    ]


def time_lines(results: Mapping[str, Any]) -> Figure:
    """What a round's time is made of: a panel per draft and temperature, per task a bar without and with."""
    lines = results["time_lines"]
    panels = list(dict.fromkeys((line["draft / target step"], line["temperature"]) for line in lines))
    temperatures = len({temperature for _, temperature in panels})
    figure = Figure(figsize=(15, 4 * len(panels) / temperatures), layout="constrained")
    grid = figure.subplots(len(panels) // temperatures, temperatures, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        chosen = [line for line in lines if (line["draft / target step"], line["temperature"]) == panel]
        draw_time_lines(axes, chosen)
        share = f"a draft step {panel[0]:g} of a target step" if panel[0] else "the small draft as it is"
        axes.set_title(f"{share}, temperature {panel[1]:g}: ms per round", fontsize=11)
    grid.flat[0].legend(fontsize=9, loc="lower right")
    made = f"{results['command']}, {results['machine']['processor']}, {results['date']}"
    figure.suptitle(textwrap.fill(made, 180), fontsize=9)
    return figure


def draw_time_lines(axes: Axes, lines: Sequence[Row]) -> None:
    """Stacked bars, and the bound: a plain step."""
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    for line in lines:
        place = tasks.index(line["task"]) + (0.2 if line["draft-ahead"] else -0.2)
        left = 0.0
        for part, colour in PARTS.items():
            label = part if line is lines[0] else None
            axes.barh(place, line[part], 0.38, left, color=colour, label=label)
            left += line[part]
        name = f"{'with' if line['draft-ahead'] else 'without'}, K = {line['depth']}"
        axes.text(left, place, f" {name}, {line['tokens per round']:.1f} tokens", va="center", fontsize=7)
    axes.axvline(lines[0]["bound"], color="black", linestyle=":", label="bound")
    axes.set_xlim(right=1.3 * max(sum(line[part] for part in PARTS) for line in lines))
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()


def main(arguments: Sequence[str]) -> None:
    argparse.ArgumentParser(prog="python -m bench plots", description=__doc__).parse_args(arguments)
    for name, draw in (("load", figure_of), ("ahead", time_lines)):
        results = json.loads((RESULTS / f"{name}.json").read_text())
        path = RESULTS / f"{name}.png"
        draw(results).savefig(path, dpi=110)
        print(path)
