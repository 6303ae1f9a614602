"""What `outrider advise` foretold beside what was then measured."""

from statistics import median

from bench.tables.reading import Row, distinct, met, number, results, table

TOKENS_AIM, SPEED_AIM = 0.05, 0.10  # by which it may be off
TOKENS, SPEED = "tokens / pass", "to plain"


def advice() -> str:
    header = [
        "target",
        "K",
        "tokens / pass, foretold",
        "measured",
        "to plain, foretold",
        "measured",
        "off by",
    ]
    lines = []
    for row in results("advise")["rows"]:
        pairs = [number(row[name]) for what in (TOKENS, SPEED) for name in (_foretold(what), what)]
        lines.append([row["target"], str(row["depth"]), *pairs, f"{_off(row, SPEED):+.0%}"])
    return table(header, lines)


def advice_summary() -> str:
    header = ["target", "tokens / pass off by at most", "aim", "met", "to plain off by, median", "at most"]
    rows = results("advise")["rows"]
    lines = []
    for target in distinct(rows, "target"):
        of_target = [row for row in rows if row["target"] == target]
        tokens, speeds = ([abs(_off(row, what)) for row in of_target] for what in (TOKENS, SPEED))
        lines.append(
            [
                target,
                *(f"{max(tokens):.1%}", f"{TOKENS_AIM:.0%}", met(max(tokens) <= TOKENS_AIM)),
                *(f"{median(speeds):.0%}", f"{max(speeds):.0%}"),
                *(f"{SPEED_AIM:.0%}", met(max(speeds) <= SPEED_AIM)),
            ]
        )
    return table([*header, "aim", "met"], lines)


def _foretold(what: str) -> str:
    return f"{what}, foretold"


def _off(row: Row, what: str) -> float:
    """Above 0: more was foretold than came."""
    return float(row[_foretold(what)] / row[what] - 1.0)
