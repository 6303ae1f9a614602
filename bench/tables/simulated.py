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
