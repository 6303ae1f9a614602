"""What is measured of the running service, or of its parts as processes of their own."""

import statistics

from bench.tables.reading import KINDS, MODES, Row, distinct, found, met, number, results, table

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


def load_tasks() -> str:
    rows = [row for row in results("load")["tasks"] if row["task"] != "creative"]
    header = ["text", "best of the others", "pace / best", "90 % interval", "aim", "met"]
    return table(header, ([KINDS[r["task"]], MODES[r["reference"]], *_compared(r)] for r in rows))


def load_creative() -> str:
    rows = [row for row in results("load")["tasks"] if row["task"] == "creative"]
    header = ["streams", "target", "pace / plain", "90 % interval", "aim", "met"]
    return table(header, ([str(row["streams"]), row["target"], *_compared(row)] for row in rows))


def load_crossing() -> str:
    header = ["from, s", "streams", "plain: tokens/s", "pace: tokens/s", "pace / plain", "met"]
    return table(
        header,
        (
            [
                number(row["from, s"], 0),
                str(row["streams"]),
                number(row["plain, tokens/s"], 0),
                number(row["adaptive, tokens/s"], 0),
                number(row["adaptive / plain"]),
                met(row["ok"]),
            ]
            for row in results("load")["crossing"]
        ),
    )


def load_open() -> str:
    rows = results("load")["open"]
    modes = [mode for mode in MODES if mode in distinct(rows, "mode")]
    return table(
        ["share of plain's capacity", *(f"{MODES[mode]}: median, 99th percentile" for mode in modes)],
        (
            [number(share, 1), *(_per_token(found(rows, share=share, mode=mode)) for mode in modes)]
            for share in distinct(rows, "share")
        ),
    )


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


def ahead_rounds() -> str:
    lines = results("ahead")["time_lines"]
    shown = []
    for share in distinct(lines, "draft / target step"):
        for temperature in distinct(lines, "temperature"):
            for is_ahead in (False, True):
                wanted = {"draft / target step": share, "temperature": temperature, "draft-ahead": is_ahead}
                alike = [line for line in lines if line.items() >= wanted.items()]
                means = (number(statistics.mean(line[part] for line in alike), 1) for part in PARTS)
                side = "with" if is_ahead else "without"
                shown.append([_draft_step(wanted), f"{temperature:g}", side, *means])
    return table(["draft step / target step", "temperature", "draft-ahead", *PARTS], shown)


def ahead_distance() -> str:
    return table(
        ["temperature", "delay added per hop, ms", "loss without draft-ahead", "loss with"],
        (
            [
                f"{row['temperature']:g}",
                f"{row['delay per hop, ms']:g}",
                number(row["loss without"]),
                number(row["loss with"]),
            ]
            for row in results("ahead")["distance"]
        ),
    )


def ahead_crowd() -> str:
    return table(
        ["streams", "without: tokens/s", "with: tokens/s", "with / without"],
        (
            [
                str(row["streams"]),
                number(row["tokens/s without"], 0),
                number(row["tokens/s with"], 0),
                number(row["with / without"]),
            ]
            for row in results("ahead")["crowd"]
        ),
    )


def service() -> str:
    header = ["delay added per hop, ms", "a round's overhead, ms: median", "90th percentile"]
    header += ["two bare hops, ms", "service / one process", "answers that are the same"]
    return table(
        header,
        (
            [
                f"{row['delay per hop, ms']:g}",
                number(row["overhead per round, ms"], 1),
                number(row["90th percentile, ms"], 1),
                number(row["two bare hops, ms"], 1),
                number(row["service / one process"]),
                f"{row['same tokens']} of {row['requests']}",
            ]
            for row in results("service")["rows"]
        ),
    )
