"""What drafters that were trained for the demo target guess right."""

from math import prod

from bench.tables.reading import KINDS, Row, distinct, found, number, results, table

ENOUGH = 100  # times that a position was reached
NAMES = {
    "model": "draft model",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "parallel": "parallel draft",
    "exit after 3": "exit after 3 of 6 layers",
    "exit after 4": "exit after 4 of 6 layers",
}


def tokens_per_pass() -> str:
    rows = results("heads")["rows"]
    columns = [(name, heat) for name in distinct(rows, "drafter") for heat in distinct(rows, "temperature")]
    lines = []
    for kind in distinct(rows, "kind"):
        of_kind = [found(rows, drafter=name, temperature=heat, kind=kind) for name, heat in columns]
        lines.append([KINDS[kind], *(number(row["tokens per pass"]) for row in of_kind)])
    return table(["text", *(f"{NAMES[name]}, {heat:g}" for name, heat in columns)], lines)


def trees() -> str:
    rows = results("trees")["rows"]
    columns = [(name, leaves) for name in distinct(rows, "drafter") for leaves in distinct(rows, "leaves")]
    lines = []
    for kind in distinct(rows, "kind"):
        cells = []
        for name, leaves in columns:
            of_heat = (
                row for row in rows if (row["drafter"], row["leaves"], row["kind"]) == (name, leaves, kind)
            )
            cells.append(" / ".join(number(row["tokens per pass"]) for row in of_heat))
        lines.append([KINDS[kind], *cells])
    return table(["text", *(f"{NAMES[name]}, {leaves} beside" for name, leaves in columns)], lines)


def acceptance() -> str:
    stored = results("heads")
    rows, depth = stored["rows"], stored["depth"]
    lines = []
    for name in distinct(rows, "drafter"):
        for kind in distinct(rows, "kind"):
            of_kind = [row for row in rows if (row["drafter"], row["kind"]) == (name, kind)]
            cells = [" / ".join(_rate(row, position) for row in of_kind) for position in range(depth)]
            lines.append([NAMES[name], KINDS[kind], *cells])
    return table(["drafter", "text", *(f"position {position + 1}" for position in range(depth))], lines)


def _rate(row: Row, position: int) -> str:
    """Nothing where too few Drafts came so far for a rate."""
    rates = row["acceptance"]
    reached = row["rounds"] * prod(rate or 0.0 for rate in rates[:position])
    return number(rates[position]) if reached >= ENOUGH else "–"
