"""Tables of the simulator, in which no model runs."""

from bench.tables.reading import number, results, table


def simulate() -> str:
    rows = results("simulate")["rows"]
    depths = [column for column in rows[0] if column.startswith("fixed ")]
    header = ["draft", "streams", "plain", *(f"K = {depth.split()[1]}" for depth in depths)]
    return table(
        [*header, "pace", "pace / best of the others"],
        (
            [
                row["draft"],
                str(row["streams"]),
                *(number(row[column], 0) for column in ("plain", *depths, "pace")),
                number(row["pace / best"]),
            ]
            for row in rows
        ),
    )


def simulate_ahead() -> str:
    return table(
        ["draft", "streams", "plain", "without: K, tokens/s", "with: K, tokens/s", "with / without"],
        (
            [
                row["draft"],
                str(row["streams"]),
                number(row["plain"], 0),
                f"{row['depth without']}: {number(row['without'], 0)}",
                f"{row['depth with']}: {number(row['with'], 0)}",
                number(row["with / without"]),
            ]
            for row in results("simulate")["ahead"]["rows"]
        ),
    )


def parallel() -> str:
    rows = results("parallel")["rows"]
    kept = [column for column in rows[0] if column.startswith("kept ")]
    modes = ["token by token", *kept]
    header = ["draft", "streams", "plain", "token by token", *(f"in one pass, {column}" for column in kept)]
    return table(
        header,
        (
            [
                row["draft"],
                str(row["streams"]),
                number(row["plain"], 0),
                *(f"{number(row[mode], 0)} ({number(row[f'depth, {mode}'], 1)})" for mode in modes),
            ]
            for row in rows
        ),
    )


def beside() -> str:
    rows = results("beside")["rows"]
    ways = ("token by token", "in one pass", "EAGLE-3")
    header = ["streams", "plain", "draft, token by token", "draft, in one pass", "EAGLE-3 head"]
    return table(
        [*header, "the head to plain"],
        (
            [
                str(row["streams"]),
                number(row["plain"], 0),
                *(
                    f"{number(row[way], 0)} ({number(row[f'depth, {way}'], 1)}, {row[f'drafted, {way}']:.0%})"
                    for way in ways
                ),
                number(row["EAGLE-3"] / row["plain"]),
            ]
            for row in rows
        ),
    )


def early() -> str:
    rows = results("early")["rows"]
    ways = ("AT_ITS_END", "FORESEEN", "COMPLETE")
    header = [
        "draft",
        "Drafts",
        "streams",
        "late, tokens/s",
        "at its end",
        "foreseen",
        "complete",
    ]
    return table(
        header,
        (
            [
                row["draft"],
                row["mode"],
                str(row["streams"]),
                number(row["LATE"], 0),
                *(f"{round(row[way] / row['LATE'] - 1, 3) + 0.0:+.1%}" for way in ways),
            ]
            for row in rows
        ),
    )


def routing() -> str:
    told = results("routing")
    drafts = list(told["acceptance"])
    return table(
        ["streams", *(f"all by {name}" for name in drafts), "best in hindsight", "routed", "regret"],
        (
            [
                str(row["streams"]),
                *(number(row[name], 0) for name in (*drafts, "best in hindsight", "routed")),
                f"{row['regret']:.1%}",
            ]
            for row in told["rows"]
        ),
    )
