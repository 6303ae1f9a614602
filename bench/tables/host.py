"""Tables of what the host's processes cost: start, messages, metrics, tracing, and others beside ours."""

from bench.tables.reading import distinct, found, met, number, results, table


def start() -> str:
    stored = results("start")
    phases = [[row["phase"], number(row["seconds"], 1)] for row in stored["rows"]]
    phases.append(["processor time of all processes", number(stored["processor_s"], 1)])
    return table(["phase", "seconds"], phases)


def start_memory() -> str:
    return table(
        ["process", "MB"], ([row["process"], number(row["MB"], 0)] for row in results("start")["memory"])
    )


def host() -> str:
    rows = results("host")["rows"]
    return table(
        ["streams", "way", "tokens/s", "to the engine", "to generate"],
        (
            [
                str(row["streams"]),
                row["way"],
                number(row["tokens/s"], 0),
                number(row["to the engine"]),
                number(row["to generate"]),
            ]
            for row in rows
        ),
    )


def host_costs() -> str:
    rows = [row for row in results("host")["rows"] if row["gateway, ms"]]
    names = [name for name in rows[0] if name.endswith(", ms")]
    return table(
        ["streams", "way", *(name.removesuffix(", ms") for name in names)],
        ([str(row["streams"]), row["way"], *(number(row[name]) for name in names)] for row in rows),
    )


def transport() -> str:
    rows = results("transport")["rows"]
    header = ["bytes", "transport", "there and back, ms", "front, ms", "engine, ms"]
    return table(
        header,
        (
            [f"{row['bytes']:,}", row["transport"], *(number(row[name], 3) for name in header[2:])]
            for row in rows
        ),
    )


def peers() -> str:
    return table(
        [
            "pair",
            "streams",
            "peer",
            "mode",
            "tokens/s",
            "to its plain",
            "tokens / pass",
            "cores",
            "texts changed",
        ],
        (
            [
                row["pair"],
                str(row["streams"]),
                row["peer"],
                row["mode"],
                number(row["tokens/s"], 0),
                number(row["to its plain"]),
                number(row["tokens / pass"]),
                number(row["cores"], 1),
                ""
                if row["mode"] == "plain"
                else f"{row['seeded texts that differ']} of {row['seeded texts']}",
            ]
            for row in sorted(
                results("peers")["rows"], key=lambda row: (row["pair"] != "demo", row["streams"])
            )
        ),
    )


def tracing() -> str:
    header = ["streams", "untraced: tokens/s", "traced: tokens/s", "traced / untraced", "90 % interval"]
    return table(
        [*header, "aim", "met"],
        (
            [
                str(row["streams"]),
                number(row["untraced, tokens/s"], 0),
                number(row["traced, tokens/s"], 0),
                number(row["ratio"], 3),
                f"{number(row['low'])} to {number(row['high'])}",
                number(row["bar"]),
                met(row["ok"]),
            ]
            for row in results("tracing")["rows"]
        ),
    )


def tracing_costs() -> str:
    (row,) = results("tracing")["rows"]
    return table(
        ["processor time per token, ms", "untraced", "traced"],
        (
            [of, *(number(row[f"{of}, {way}, CPU ms/token"]) for way in ("untraced", "traced"))]
            for of in ("gateway", "collector", "target", "draft")
        ),
    )


def metrics() -> str:
    return table(
        ["of each", "what", "microseconds"],
        ([row["of"], row["what"], number(row["microseconds"], 0)] for row in results("metrics")["rows"]),
    )


def wire() -> str:
    rows = results("wire")["rows"]
    columns = ("step ms", "gateway ms", "target ms")
    lines = []
    for sequences in distinct(rows, "sequences"):
        each, one = (
            found(rows, sequences=sequences, messages=way) for way in ("a stream each", "one stream")
        )
        pairs = (f"{number(each[column], 1)} / {number(one[column], 1)}" for column in columns)
        lines.append([str(sequences), *pairs, number(each["step ms"] / one["step ms"], 1)])
    header = ["a step, ms", "gateway's processor time, ms", "target's processor time, ms"]
    return table(["sequences", *header, "times faster"], lines)
