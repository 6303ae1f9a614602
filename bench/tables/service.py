"""Tables of the running service, or of its parts in processes of their own."""

from bench.tables.reading import MODES, Row, distinct, found, met, number, results, table

PARTS = ("gateway", "wire", "draft", "wait", "target", "bound")


def load_closed() -> str:
    stored = results("load")
    modes = distinct(stored["rows"], "mode")
    header = ["streams", "target", *(f"{MODES[mode]}: tokens/s" for mode in modes)]
    header += ["best of the others", "pace / best", "90 % interval", "aim", "met"]
    header += ["passes with a Draft", "mean depth"]
    lines = []
    for compared in stored["ratios"]:
        point = {"streams": compared["streams"], "target": compared["target"]}
        by_mode = {mode: found(stored["rows"], mode=mode, **point) for mode in modes}
        pace = by_mode["adaptive"]
        lines.append(
            [
                str(compared["streams"]),
                compared["target"],
                *(number(by_mode[mode]["tokens/s"], 0) for mode in modes),
                MODES[compared["reference"]],
                *_compared(compared),
                number(pace["share of passes with a Draft"]),
                number(pace["mean depth"], 1),
            ]
        )
    return table(header, lines)


def _compared(row: Row) -> list[str]:
    interval = f"{number(row['low'])} to {number(row['high'])}"
    return [number(row["adaptive / reference"]), interval, number(row["bar"]), met(row["ok"])]


def load_creative() -> str:
    rows = [row for row in results("load")["tasks"] if row["task"] == "creative"]
    header = ["streams", "target", "pace / plain", "90 % interval", "aim", "met"]
    return table(header, ([str(row["streams"]), row["target"], *_compared(row)] for row in rows))


def _per_token(row: Row) -> str:
    return f"{number(row['per token p50, ms'], 0)}, {number(row['per token p99, ms'], 0)}"


def ahead() -> str:
    header = ["draft step / target step", "temperature", "without: K, tokens/s", "with: K, tokens/s"]
    header += ["with / without", "the simulator's", "verdicts foreseen"]
    header += ["rounds that the target began by itself", "share of the bound"]
    return table(
        header,
        (
            [
                _draft_step(row),
                f"{row['temperature']:g}",
                f"{row['depth without']}: {number(row['tokens/s without'], 1)}",
                f"{row['depth with']}: {number(row['tokens/s with'], 1)}",
                *(
                    number(row[column])
                    for column in (
                        "with / without",
                        "predicted",
                        "foreseen",
                        "target had it",
                        "share of the bound",
                    )
                ),
            ]
            for row in results("ahead")["rows"]
        ),
    )


def _draft_step(row: Row) -> str:
    share = row["draft / target step"]
    return f"{share:g}" if share else "the small draft as it is"
