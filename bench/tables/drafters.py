"""What every drafter brings: right guesses, tokens per pass, and speed."""

from statistics import median

from bench.tables.reading import KINDS, Row, distinct, number, results, table

ENOUGH = 100  # times that a position was reached
NAMES = {
    "model": "draft model",
    "parallel": "parallel draft",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "exit after 1": "exit after 1 of 6 layers",
    "exit after 2": "exit after 2 of 6 layers",
    "exit after 3": "exit after 3 of 6 layers",
    "exit after 4": "exit after 4 of 6 layers",
    "ngram": "n-grams",
    "suffix": "suffixes",
    "model+suffix": "draft model and suffixes",
}


def tokens_per_pass() -> str:
    rows = _part("counts")["rows"]
    kinds = distinct(rows, "kind")
    lines = []
    for name in distinct(rows, "drafter"):
        of_name = [row for row in rows if row["drafter"] == name]
        drafts = sum(row["drafts"] for row in of_name) / sum(row["rounds"] for row in of_name)
        cells = (_by_temperature(of_name, kind, "tokens per pass") for kind in kinds)
        lines.append([NAMES[name], *cells, f"{drafts:.0%}"])
    return table(["drafter", *(KINDS[kind] for kind in kinds), "rounds with a Draft"], lines)


def trees() -> str:
    rows = results("trees")["rows"]
    columns = [(name, leaves) for name in distinct(rows, "drafter") for leaves in distinct(rows, "leaves")]
    lines = []
    for kind in distinct(rows, "kind"):
        cells = []
        for name, leaves in columns:
            of_column = [row for row in rows if (row["drafter"], row["leaves"]) == (name, leaves)]
            cells.append(_by_temperature(of_column, kind, "tokens per pass"))
        lines.append([KINDS[kind], *cells])
    return table(["text", *(f"{NAMES[name]}, {leaves} beside" for name, leaves in columns)], lines)


def tree_times() -> str:
    rows = results("trees")["times"]
    columns = ("pass / target step", "to plain")
    lines = []
    for leaves in distinct(rows, "leaves"):
        of_width = [row for row in rows if row["leaves"] == leaves]
        lines.append([str(leaves), *(number(row[column]) for row in of_width for column in columns)])
    header = (f"{NAMES[name]}: {column}" for name in distinct(rows, "drafter") for column in columns)
    return table(["nodes beside the chain", *header], lines)


def acceptance() -> str:
    part = _part("counts")
    rows, depth = part["rows"], part["depth"]
    lines = []
    for name in distinct(rows, "drafter"):
        for kind in distinct(rows, "kind"):
            of_kind = [row for row in rows if (row["drafter"], row["kind"]) == (name, kind)]
            cells = [" / ".join(_rate(row, position) for row in of_kind) for position in range(depth)]
            lines.append([NAMES[name], KINDS[kind], *cells])
    return table(["drafter", "text", *(f"position {position + 1}" for position in range(depth))], lines)


def _rate(row: Row, position: int) -> str:
    """Nothing where too few Drafts came so far for a rate."""
    reached = row["reached"][position]
    return number(row["accepted"][position] / reached) if reached >= ENOUGH else "–"


def _by_temperature(rows: list[Row], kind: str, column: str) -> str:
    return " / ".join(number(row[column]) for row in rows if row["kind"] == kind)


def _part(name: str) -> Row:
    part: Row = results("drafters")["parts"][name]
    return part


def speed() -> str:
    """In one process."""
    rows = _part("engine")["rows"]
    kinds, lines = distinct(rows, "kind"), []
    for name in distinct(rows, "drafter"):
        for streams in distinct(rows, "streams"):
            alike = [row for row in rows if (row["drafter"], row["streams"]) == (name, streams)]
            cells = (_by_temperature(alike, kind, "to plain") for kind in kinds)
            shares = (_median(alike, column) for column in ("Draft / target step", "pass / target step"))
            lines.append([NAMES[name], str(streams), *shares, *cells])
    header = ["drafter", "streams", "Draft / target step", "pass / target step"]
    return table([*header, *(KINDS[kind] for kind in kinds)], lines)


def served() -> str:
    return _served("to plain")


def served_tokens() -> str:
    return _served("tokens per pass")


def _served(column: str) -> str:
    rows = _part("service")["rows"]
    kinds, lines = distinct(rows, "kind"), []
    for name in distinct(rows, "drafter"):
        for streams in distinct(rows, "streams"):
            alike = [row for row in rows if (row["drafter"], row["streams"]) == (name, streams)]
            shares = [row["share of passes with a Draft"] for row in alike]
            cells = (_by_temperature(alike, kind, column) for kind in kinds)
            lines.append([NAMES[name], str(streams), f"{min(shares):.0%} – {max(shares):.0%}", *cells])
    header = ["drafter", "streams", "passes with a Draft"]
    return table([*header, *(KINDS[kind] for kind in kinds)], lines)


def layerskip() -> str:
    rows = results("layerskip")["rows"]
    names = {"target": "demo target", "layerskip": "trained to be left early"}
    kinds, lines = distinct(rows, "kind"), []
    for target in distinct(rows, "target"):
        for layers in distinct(rows, "layers"):
            alike = [row for row in rows if (row["target"], row["layers"]) == (target, layers)]
            cells = (_by_temperature(alike, kind, "tokens per pass") for kind in kinds)
            lines.append([names[target], str(layers), *cells, str(sum(row["differ"] for row in alike))])
    columns = (KINDS[kind] for kind in kinds)
    return table(["target", "layers that draft", *columns, "answers that differ"], lines)


def _median(rows: list[Row], column: str) -> str:
    return number(median(row[column] for row in rows))
