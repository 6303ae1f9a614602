"""Tables of the pages of docs/, each written from the results of its benchmark."""

import statistics
from collections.abc import Iterator, Sequence

from bench.tables.reading import AHEAD, KINDS, MODES, Row, found, number, pivoted, results, written

GPU_MODES = {"plain": "plain", "adaptive": "pace", "fixed-5": "K = 5"}
GPU_MODELS = {
    "target": "8B",
    "draft": "1B",
    "int8": "1B in 8 bit",
    "int4": "1B in 4 bit",
    "compressed fp8": "1B in FP8",
    "experts": "12 layers of Qwen3-30B-A3B",
    "rank": "8 layers of a rank of four of a 70B",
}


def engine_one_stream() -> str:
    stored = results("engine")
    rows = [{**row, "kind": KINDS.get(row["kind"], row["kind"])} for row in stored["rows"]]

    def told(row: Row) -> Row:
        depth = f"K = {row['depth']}"
        return {
            "plain tokens/s": number(row["plain tokens/s"], 1),
            f"{depth}: to plain": row["ratio"],
            f"{depth}: share of bound": row["share of bound"],
        }

    means = {f"K = {row['depth']}: to plain": row["ratio"] for row in stored["means"] if row["batch"] == 1}
    lines = pivoted((row for row in rows if row["batch"] == 1), {"text": "kind"}, told)
    return written([*lines, {"text": "mean", **means}])


def engine_streams() -> str:
    rows = [{**row, "kind": KINDS.get(row["kind"], row["kind"])} for row in results("engine")["rows"]]
    return written(
        pivoted(
            (row for row in rows if row["batch"] > 1),
            {"to plain": "kind"},
            lambda row: {f"{row['batch']} streams, K = {row['depth']}": row["ratio"]},
        )
    )


def load() -> str:
    stored = results("load")
    creative = {(row["target"], row["streams"]): row for row in stored["creative"]}

    def interval(row: Row) -> str:
        return f"{number(row['low'])} to {number(row['high'])}"

    def lines() -> Iterator[Row]:
        for row in stored["ratios"]:
            point = {"streams": row["streams"], "target": row["target"]}
            by_mode = {mode: found(stored["rows"], mode=mode, **point) for mode in MODES}
            pace, stories = by_mode["adaptive"], creative.get((row["target"], row["streams"]))
            yield {
                **point,
                **{f"{MODES[mode]}: tokens/s": number(by_mode[mode]["tokens/s"], 0) for mode in MODES},
                "best of the others": MODES[row["reference"]],
                "pace / best": row["adaptive / reference"],
                "90 % interval": interval(row),
                "met": "yes" if row["ok"] else "**no**",
                "passes with a Draft": pace["share of passes with a Draft"],
                "mean depth": number(pace["mean depth"], 1),
                "stories: pace / plain": stories and stories["adaptive / reference"],
                "interval": stories and interval(stories),
            }

    return written(lines())


def stalls() -> str:
    stored = results("stalls")
    rows = [{**row, "gaps": number(row["gaps"], 0)} for row in stored["rows"]]
    return f"{written(rows)}\n\n{stored['changed']} of {stored['texts']} texts changed between the two runs."


def simulate() -> str:
    def told(row: Row) -> Row:
        rates = {f"K = {name.split()[1]}": row[name] for name in row if name.startswith("fixed ")}
        rates = {"plain": row["plain"], **rates, "pace": row["pace"], AHEAD: row.get(AHEAD)}
        return {name: number(rate, 0) for name, rate in rates.items()}

    return written(
        {
            "context": number(row["context"], 0),
            "draft": row["draft"],
            "streams": row["streams"],
            **told(row),
            "pace / best of the others": row["pace / best"],
            "to plain": row["to plain"],
        }
        for row in results("simulate")["rows"]
    )


def simulate_before() -> str:
    """Returns plain decoding and the pace, before and today, with draft-ahead if there is a draft worker."""
    today = {(row["context"], row["draft"], row["streams"]): row for row in results("simulate")["rows"]}

    def lines() -> Iterator[Row]:
        for row in results("simulate_before")["rows"]:
            case = row["context"], row["draft"], row["streams"]
            line = {"context": number(row["context"], 0), "draft": row["draft"], "streams": row["streams"]}
            for stage, rates in (("before", row), ("today", today[case])):
                line |= {
                    f"{stage}: plain": number(rates["plain"], 0),
                    f"{stage}: pace": number(rates.get(AHEAD, rates["pace"]), 0),
                    f"{stage}: to plain": rates["to plain"],
                }
            yield line

    return written(lines())


def mixture() -> str:
    def counted(row: Row) -> str:
        plain, drafted = row["experts, plain"], row["experts, K = 4"]
        return "" if row["target"] == "dense" else f"{number(plain, 0)}, {number(drafted, 0)}"

    return written(
        {
            "target": row["target"],
            "streams": row["streams"],
            "experts read: plain, K = 4": counted(row),
            **{name: number(row[key], 0) for name, key in MIXTURE_RATES.items()},
            "pace / plain": row["pace / plain"],
            "pace / best of the others": row["pace / best"],
            "passes with a Draft": row["share of passes with a Draft"],
            "mean depth": number(row["mean depth"], 1),
        }
        for row in results("mixture")["rows"]
    )


MIXTURE_RATES = {"plain": "plain", "K = 2": "fixed 2", "K = 4": "fixed 4", "K = 8": "fixed 8", "pace": "pace"}


def drafters() -> str:
    """Returns tokens per pass and speed of each drafter, by kind of text, temperature and streams."""

    return _speed_of_drafters(priced=False)


def drafters_acceptance() -> str:
    """Returns acceptance by position of each drafter at most streams, by kind of text and temperature."""
    rows = _of_drafters(priced=False)
    most = max(row["streams"] for row in rows)
    return written(
        pivoted(
            (row for row in rows if row["streams"] == most),
            {name: name for name in ("text", "temperature")},
            lambda row: {row["drafter"]: " ".join(map(number, row["acceptance"]))},
        )
    )


def drafters_cost() -> str:
    """Returns the time of a Draft to a step's, by streams: the median over kinds of text."""
    of_drafters: dict[tuple[int, str], list[float]] = {}
    for row in _of_drafters(priced=False):
        of_drafters.setdefault((row["streams"], row["drafter"]), []).append(row["Draft / target step"])
    rows = [
        {"streams": streams, "drafter": name, "cost": statistics.median(costs)}
        for (streams, name), costs in of_drafters.items()
    ]
    return written(pivoted(rows, {"streams": "streams"}, lambda row: {row["drafter"]: row["cost"]}))


def drafters_united() -> str:
    """Returns a head alone and in one tree with indices, both without nodes that cost too much."""
    return _speed_of_drafters(priced=True)


def drafters_predicted() -> str:
    """Returns the passes that code takes whose answers are predicted, by edits and drafter."""
    rows = results("drafters")["predictions"]
    return written(
        pivoted(rows, {"replaced": "edited"}, lambda row: {f"{row['drafter']}: passes": row["passes"]})
    )


def _speed_of_drafters(*, priced: bool) -> str:
    def told(row: Row) -> Row:
        name = row["drafter"]
        return {f"{name}: tokens / pass": row["tokens / pass"], f"{name}: to plain": row["to plain"]}

    by = {name: name for name in ("text", "temperature", "streams")}
    return written(pivoted(_of_drafters(priced=priced), by, told))


def _of_drafters(*, priced: bool) -> list[Row]:
    """Returns measures of drafters. priced: Drafts without nodes that cost more than they bring."""
    return [
        {**row, "text": KINDS.get(row["text"], row["text"])}
        for row in results("drafters")["rows"]
        if (row["least survival"] > 0) == priced
    ]


MEASURED = {
    "step, graphs": "steps in graphs",
    "step, batch_invariant": "steps with batch-invariant numerics",
    "step, no graphs": "steps without graphs",
    "answer": "answers, plain and with Drafts",
    "prompt": "prompts",
    "step on an H200": "steps in graphs on an H200, today's host",
}


def costs() -> str:
    def lines() -> Iterator[Row]:
        for kind, title in MEASURED.items():
            rows = [row for row in results("costs")["rows"] if row["what"].startswith(kind)]
            ratios = [row["predicted / measured"] for row in rows]
            yield {
                "measured": title,
                "rows": len(ratios),
                "predicted / measured: median": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }

    return written(lines())


def costs_rounds() -> str:
    return written(
        {
            "engine": row["engine"],
            "context": number(row["context"], 0),
            **{name: number(row[name], 1) for name in ("target ms", "draft ms", "hops ms", "round ms")},
            "tokens/s": number(row["tokens/s"], 0),
            "plain": number(row["plain"], 0),
            "to plain": row["to plain"],
        }
        for row in results("costs")["rounds"]
    )


def host() -> str:
    """Returns the speed of each way, and the processor time of a token in each process of a service."""
    parts = {
        "engine": ("engine of the target", "engine of the draft"),
        "frontends": ("target", "draft"),
        "gateway": ("gateway",),
        "proxy": ("proxy",),
        "client": ("client",),
    }

    def lines() -> Iterator[Row]:
        for row in results("host")["rows"]:
            times = {f"{name}, ms": sum(row[f"{part}, ms"] for part in of) for name, of in parts.items()}
            yield {
                "streams": row["streams"],
                "way": row["way"],
                "tokens/s": number(row["tokens/s"], 0),
                "to the engine": row["to the engine"],
                "to generate": row["to generate"],
                **(times if any(times.values()) else {}),
            }

    return written(lines())


def peers() -> str:
    def told(row: Row) -> Row:
        rate = number(row["tokens/s"], 0)
        if row["mode"] == "plain":
            return {"plain: tokens/s": rate}
        speed = {f"{row['mode']}: tokens/s": rate, f"{row['mode']}, to plain": row["to its plain"]}
        if row["mode"] == "pace":
            return speed
        return {**speed, "tokens / pass": row["tokens / pass"], "texts changed": changed(row)}

    rows = sorted(results("peers")["rows"], key=lambda row: (row["pair"] != "demo", row["streams"]))
    return written(pivoted(rows, {name: name for name in ("pair", "streams", "peer")}, told))


def changed(row: Row) -> str:
    """Returns how many seeded texts of a peer are other texts with Drafts."""
    return f"{row['seeded texts that differ']} of {row['seeded texts']}"


def identity() -> str:
    rows = results("identity")["rows"]
    heading = f"differ of {rows[0]['requests']}"
    return written(pivoted(rows, {heading: "way"}, lambda row: {numerics(row): row["differ"]}))


def numerics(row: Row) -> str:
    return f"{row['dtype']}{', batch-invariant' if row['batch_invariant'] else ''}"


def batch_invariant() -> str:
    rows = results("batch_invariant")["rows"]
    heading = "sequences x tokens of each"
    return written(pivoted(rows, {heading: "step"}, lambda row: {row["dtype"]: row["ratio"]}))


def step() -> str:
    return written(
        {
            "sequences": row["sequences"],
            "tokens of each": row["tokens each"],
            "ms": number(row["ms"], 1),
            "to reading the weights once": row["to reading the weights"],
            "to one token": row["to one token"],
        }
        for row in results("step")["rows"]
    )


def gpu_steps() -> str:
    def told(row: Row) -> Row:
        ms = {f"{row['model']}, {row['sampling']}: ms": number(row["ms"], 1)}
        if row["sampling"] == "greedy":
            ms[f"{row['model']}: of the limit"] = number(row["share of the bandwidth limit"])
        return ms

    def shape(row: Row) -> Row:
        tree = " tree" if row["draft"] == "tree" else ""
        tokens = f"{row['sequences']} x {row['tokens each']}{tree}"
        return {**row, "asked": row["asked"].replace("_", "-"), "tokens": tokens}

    by = {"sequences x tokens": "tokens", "asked for": "asked"}
    return written(pivoted(map(shape, results("gpu")["steps"]), by, told))


def on_device_service() -> str:
    return written(_of_service(results("on_device")["service"]))


def on_device_streams() -> str:
    kept = results("on_device_streams")
    versions = ("before", "after")
    return written(
        [{"gateway": version, **line} for version in versions for line in _of_service(kept[version])]
    )


def _of_service(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the lines of a service with the draft beside the target, in the order measured."""
    for row in rows:
        if row["part"] == "colocated" and "mode" in row and "prompts among them" not in row:
            yield {
                "streams": row["streams"],
                "mode": GPU_MODES[row["mode"]],
                "tokens/s": number(row["tokens/s"], 0),
                "to plain": row["to plain"],
                "mean depth": number(row["mean depth"], 1),
                "tokens a pass": row["tokens a pass"],
                "first token p50, ms": number(row["first token p50, ms"], 0),
                "between chunks p99, ms": number(row["between chunks p99, ms"], 0),
                "GPU busy, %": number(row["GPU busy, %"], 0),
                "correct texts": f"{row['correct texts']} of {row['streams']}",
            }


def on_device_engine() -> str:
    def lines() -> Iterator[Row]:
        for row in results("on_device")["engine"]:
            if "tokens each" in row:
                yield {
                    "model": GPU_MODELS[row.get("model") or row.get("weights") or row["part"]],
                    "sequences x tokens": f"{row['sequences']} x {row['tokens each']}",
                    "step, ms": number(row["ms"], 1),
                    "on the device, ms": number(row["device ms"], 1),
                    "of the limit": row["share of the bandwidth limit"],
                }

    return written(lines())
