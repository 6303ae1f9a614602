"""Tables of the cost of the host's processes: start, messages, metrics, tracing, and peers."""

from bench.tables.reading import number, results, table


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
    """Processor time of a token in each process of a service."""
    processes = {
        "engine": ("engine of the target", "engine of the draft"),
        "frontends": ("target", "draft"),
        "gateway": ("gateway",),
        "proxy": ("proxy",),
        "client": ("client",),
    }
    return table(
        ["streams", "way", *(f"{name}, ms" for name in processes)],
        (
            [
                str(row["streams"]),
                row["way"],
                *(number(sum(row[f"{name}, ms"] for name in of_it)) for of_it in processes.values()),
            ]
            for row in results("host")["rows"]
            if any(row[f"{name}, ms"] for of_it in processes.values() for name in of_it)
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
