"""What a draft that was fitted to a new kind of text guesses right, of that kind and of the old ones."""

from bench.tables.reading import KINDS, Row, distinct, found, number, results, table

NEW = {"consignments": "**consignment notes** (new)"}


def distil() -> str:
    rows = results("distil")["rows"]
    before, *after = distinct(rows, "draft")
    lines = []
    for kind in distinct(rows, "kind"):
        of_kind = [found(rows, kind=kind, draft=draft) for draft in (before, *after)]
        lines.append([NEW.get(kind) or KINDS[kind], *map(_cell, of_kind)])
    return table(["text", before, *(f"fitted to {draft}" for draft in after)], lines)


def distil_taken() -> str:
    header = ["fitted to", "texts", "tokens", "steps", "best after", "minutes of a processor"]
    return table(
        header,
        [
            [
                row["fitted to"],
                f"{row['texts']:,}",
                f"{row['tokens']:,}",
                str(row["steps"]),
                str(row["best step"]),
                number(row["processor, s"] / 60, 1),
            ]
            for row in results("distil")["taken"]
        ],
    )


def _cell(row: Row) -> str:
    return f"{number(row['acceptance'])} ({number(row['tokens per pass'])})"
