"""Tables of the model of a step's costs."""

import statistics

from bench.tables.reading import number, results, table

KINDS = {
    "step, graphs": "steps in graphs",
    "step, batch_invariant": "steps with batch-invariant numerics",
    "step, no graphs": "steps without graphs",
    "answer": "answers, plain and with Drafts",
    "prompt": "prompts",
}


def costs() -> str:
    rows = results("costs")["rows"]
    lines = []
    for kind, title in KINDS.items():
        ratios = [row["predicted / measured"] for row in rows if row["what"].startswith(kind)]
        cells = statistics.median(ratios), min(ratios), max(ratios)
        lines.append([title, str(len(ratios)), *map(number, cells)])
    return table(["measured on an H100", "rows", "predicted / measured: median", "least", "most"], lines)


def costs_rounds() -> str:
    parts = ["target ms", "draft ms", "hops ms", "round ms"]
    names = ["engine", "context", *parts, "tokens/s", "plain", "to plain"]
    return table(
        names,
        (
            [
                row["engine"],
                f"{row['context']:,}",
                *(number(row[name], 1) for name in names[2:6]),
                *(number(row[name], 0) for name in names[6:8]),
                number(row["to plain"]),
            ]
            for row in results("costs")["rounds"]
        ),
    )
