"""Formats a report as Markdown: the verdict first, then a table for each part."""

from workshop.checking.paired import Paired
from workshop.checking.report import CheckReport, Distributions, Perplexity, Seeded, Tasks
from workshop.checking.two_sample import POWER
from workshop.markdown import table

DIFFERENCES = 10  # rows of differences that are shown


def markdown(report: CheckReport) -> str:
    a, b = report.sides
    parts = [
        f"# {'They differ' if report.differs else 'No difference found'}\n",
        "".join(f"- {reason}\n" for reason in report.reasons),
        table(
            ["", "address", "model", "speculation"],
            [[side.name, side.url, side.model, side.speculation] for side in (a, b)],
        ),
        "" if report.seeded is None else _seeded(report.seeded),
        "" if report.distributions is None else _distributions(report.distributions),
        "" if report.perplexity is None else _perplexity(report.perplexity),
        "" if report.tasks is None else _tasks(report.tasks),
        "" if report.paired is None else _paired(report.paired, 1 - report.settings.false_alarm),
        f"It took {report.seconds:.0f} s, seed {report.settings.seed}.\n",
    ]
    return "\n".join(part for part in parts if part)


def _seeded(part: Seeded) -> str:
    rows = [[count.kind, str(count.requests), str(count.identical)] for count in part.kinds]
    rows.append(["all", str(part.requests), str(part.identical)])
    told = (
        f"{part.tokens:,} tokens were compared. Log-probabilities of the same token differ by"
        f" {part.mean_rounding:.2g} nats on average, {part.largest_rounding:.2g} at most."
    )
    differences = [
        [
            str(difference.request),
            difference.kind,
            str(difference.position),
            *map(_code, difference.tokens),
            *(_number(gap) for gap in difference.gaps),
            "yes" if difference.is_near_tie else "no",
        ]
        for difference in part.differences[:DIFFERENCES]
    ]
    header = ["request", "kind", "position", "token of A", "of B", "gap at A", "at B", "near-tie"]
    shown = f"\nWhere answers part first:\n\n{table(header, differences)}" if differences else ""
    return f"## Seeded requests\n\n{table(['kind', 'requests', 'identical'], rows)}\n{told}\n{shown}"


def _distributions(part: Distributions) -> str:
    test = part.test
    told = (
        f"{part.samples:,} texts of {part.tokens} tokens for each of {part.prompts} prompts at temperature"
        f" {part.temperature:g}, verification `{part.verification}`: p = {test.p_value:.2g}."
    )
    if test.distance is not None:
        found = (
            f" In {POWER * 100:.0f} of 100 cases this finds a total variation distance of {test.distance:.3f}"
            f" between next tokens (root mean square over {test.num_tables} prompts and positions)."
        )
        told += found
    rows = [
        [str(moved.prompt), str(moved.position), _code(moved.token), str(moved.a), str(moved.b)]
        for moved in test.most_moved
    ]
    cells = table(["prompt", "position", "token", "texts of A", "of B"], rows) if part.reasons else ""
    return f"## Distributions\n\n{told}\n" + (f"\nWhat moved most:\n\n{cells}" if cells else "")


def _perplexity(part: Perplexity) -> str:
    row = [
        f"{part.tokens:,}",
        f"{part.a:.5g}",
        f"{part.b:.5g}",
        f"{part.mean_difference:.2g}",
        f"{part.largest_difference:.2g}",
    ]
    header = ["tokens", "perplexity at A", "at B", "mean difference of a token, nats", "largest"]
    return f"## Perplexity\n\n{table(header, [row])}"


def _tasks(part: Tasks) -> str:
    rows = [
        [
            metric.task,
            metric.metric,
            str(metric.documents),
            f"{metric.a:.4g}",
            f"{metric.b:.4g}",
            str(metric.a_better),
            str(metric.b_better),
            f"{metric.p_value:.2g}",
        ]
        for metric in part.metrics
    ]
    header = ["task", "metric", "documents", "A", "B", "better at A", "better at B", "p"]
    return f"## Tasks\n\n{table(header, rows)}"


def _paired(part: Paired, level: float) -> str:
    identical, (low, high) = part.items - len(part.differences), part.interval
    first, share = part.runs[0], part.share_of_items
    rows = [
        [
            run.name,
            f"{run.tokens:,}",
            f"{run.target_passes:,}",
            f"{run.target_passes / first.target_passes:.2f}",
            f"{run.seconds:.1f}",
            f"{run.seconds / first.seconds:.2f}",
        ]
        for run in part.runs
    ]
    told = [
        f"{identical} of {part.items} answers are identical.",
        ""
        if part.median_position is None
        else f"Half of the rest part within the first {part.median_position + 1:g} tokens.",
        f"{part.accepted_predictions:,} of {part.accepted_predictions + part.rejected_predictions:,}"
        " tokens of A's answers stand in B's answers.",
        ""
        if part.other_than_fresh is None
        else f"{part.other_than_fresh} of {part.items} answers differ from those of run B afresh.",
    ]
    effect = (
        f"Score `{part.score}`: {part.mean_a:.4g} at A, {part.mean_b:.4g} at B, difference"
        f" {part.difference:.3g}, with {level:.2%} confidence between {low:.3g} and {high:.3g}."
    )
    if share is not None:
        effect += (
            f" The variance of a difference is {part.variance:.3g}, with independent seeds"
            f" {part.independent_variance:.3g}: {share:.2f} times as many items suffice."
        )
    parted = [[str(each.item), str(each.position)] for each in part.differences[:DIFFERENCES]]
    shown = f"\nWhere answers part first:\n\n{table(['item', 'token'], parted)}" if parted else ""
    header = ["run", "tokens", "passes", "of A", "seconds", "of A"]
    return f"## Paired runs\n\n{table(header, rows)}\n{' '.join(filter(None, told))}\n\n{effect}\n{shown}"


def _code(token: str) -> str:
    """Returns a token as code in a table's cell."""
    return "`" + repr(token).replace("`", "'").replace("|", "\\|") + "`"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
