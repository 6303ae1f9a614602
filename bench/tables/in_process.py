"""What is measured in one process: drafting, steps, the choice of tokens, and whether texts agree."""

from collections.abc import Iterable, Mapping

from bench.tables.reading import KINDS, Row, distinct, found, ms, number, results, table


def engine_one_stream() -> str:
    stored = results("engine")
    rows = [row for row in stored["rows"] if row["batch"] == 1]
    depths = distinct(rows, "depth")
    header = ["text", "plain tokens/s"]
    header += [f"K = {depth}: {what}" for depth in depths for what in ("to plain", "share of bound")]
    lines = []
    for kind in distinct(rows, "kind"):
        of_kind = [found(rows, kind=kind, depth=depth) for depth in depths]
        cells = [number(row[column]) for row in of_kind for column in ("ratio", "share of bound")]
        lines.append([KINDS[kind], number(of_kind[0]["plain tokens/s"], 1), *cells])
    means = [number(found(stored["means"], batch=1, depth=depth)["ratio"]) for depth in depths]
    lines.append(["mean", "", *(cell for mean in means for cell in (mean, ""))])
    return table(header, lines)


def engine_costs() -> str:
    rows = [row for row in results("engine")["rows"] if row["batch"] == 1]
    lines = []
    for depth in distinct(rows, "depth"):
        of_depth = [row for row in rows if row["depth"] == depth]
        verifying = [row["verify / plain step"] for row in of_depth]
        drafting = [row["draft share"] for row in of_depth]
        lines.append(
            [
                str(depth),
                f"{number(min(verifying))} to {number(max(verifying))}",
                f"{number(min(drafting))} to {number(max(drafting))}",
            ]
        )
    return table(["K", "verifying K + 1 tokens / plain step", "draft's share of the time"], lines)


def engine_streams() -> str:
    rows = [row for row in results("engine")["rows"] if row["batch"] > 1]
    shapes = [(batch, depth) for batch in distinct(rows, "batch") for depth in distinct(rows, "depth")]
    return table(
        ["to plain", *(f"{batch} streams, K = {depth}" for batch, depth in shapes)],
        (
            [
                KINDS[kind],
                *(number(found(rows, kind=kind, batch=b, depth=d)["ratio"]) for b, d in shapes),
            ]
            for kind in distinct(rows, "kind")
        ),
    )


def suffix() -> str:
    rows = results("suffix")["rows"]
    drafters = [column for column in rows[0] if column != "kind"]
    return table(
        ["text", *drafters],
        ([KINDS[row["kind"]], *(number(row[drafter]) for drafter in drafters)] for row in rows),
    )


def identity() -> str:
    rows = results("identity")["rows"]
    kinds = list(dict.fromkeys((row["dtype"], is_batch_invariant(row)) for row in rows))
    by_way = {(row["way"], row["dtype"], is_batch_invariant(row)): str(row["differ"]) for row in rows}
    header = [f"{dtype}, batch-invariant" if invariant else dtype for dtype, invariant in kinds]
    return table(
        [f"differ of {rows[0]['requests']}", *header],
        ([way, *(by_way.get((way, *kind), "") for kind in kinds)] for way in distinct(rows, "way")),
    )


def structured() -> str:
    rows = results("structured")["rows"]
    header = [f"{rows[0]['answers']} answers", "tokens", "tokens per pass", "tokens/s", "valid", "right"]
    return table(
        header,
        (
            [
                row["way"],
                str(row["tokens"]),
                number(row["tokens / pass"]),
                number(row["tokens/s"], 1),
                str(row["valid"]),
                str(row["right"]),
            ]
            for row in rows
        ),
    )


def structured_masks() -> str:
    rows = results("structured")["masks"]
    columns = {
        "tokens": 0,
        "reading it, s": 2,
        "compiling, ms": 1,
        "a mask, us": 0,
        "95th percentile, us": 0,
        "a Draft of 8, us": 0,
        "its 95th percentile, us": 0,
    }
    return table(
        ["vocabulary", *columns],
        (
            [row["vocabulary"], *(number(row[name], digits) for name, digits in columns.items())]
            for row in rows
        ),
    )


def is_batch_invariant(row: Row) -> bool:
    """Older results say it by another name."""
    return bool(row["batch_invariant"] if "batch_invariant" in row else row["reproducible"])


def batch_invariant() -> str:
    rows = results("batch_invariant")["rows"]
    dtypes = distinct(rows, "dtype")
    return table(
        ["sequences x tokens of each", *dtypes],
        (
            [step, *(number(found(rows, step=step, dtype=dtype)["ratio"]) for dtype in dtypes)]
            for step in distinct(rows, "step")
        ),
    )


def quantized_steps() -> str:
    rows = results("quantized")["rows"]
    tokens = distinct(rows, "tokens")
    return table(
        ["weights", *(f"{count} token{'s' if count > 1 else ''}" for count in tokens)],
        (
            [
                weights,
                *(number(found(rows, weights=weights, tokens=count)["to bfloat16"]) for count in tokens),
            ]
            for weights in distinct(rows, "weights")
            if weights != "bfloat16"
        ),
    )


def quantized_acceptance() -> str:
    return table(
        ["draft", "weights", "acceptance rate", "tokens per pass", "texts that differ from the plain one"],
        (
            [
                row["draft"],
                row["weights"],
                number(row["acceptance rate"], 3),
                number(row["tokens / pass"]),
                f"{row['differ']} of {row['requests']}",
            ]
            for row in results("quantized")["acceptance"]
        ),
    )


def step() -> str:
    return table(
        ["sequences", "tokens of each", "ms", "to reading the weights once", "to one token"],
        (
            [
                str(row["sequences"]),
                str(row["tokens each"]),
                number(row["ms"], 1),
                number(row["to reading the weights"]),
                number(row["to one token"]),
            ]
            for row in results("step")["rows"]
        ),
    )


def step_profile() -> str:
    profile = results("step")["profile"]
    return table(["part of a step of one token", "ms"], ([k, number(v)] for k, v in _milliseconds(profile)))


def _milliseconds(profile: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    for name, value in profile.items():
        if name.endswith(" ms"):
            yield name.removesuffix(" ms"), value


def plain() -> str:
    return table(
        ["batch", "outrider: tokens/s", "generate: tokens/s", "outrider / generate"],
        (
            [
                str(row["batch"]),
                number(row["outrider tokens/s"], 0),
                number(row["generate tokens/s"], 0),
                number(row["ratio"]),
            ]
            for row in results("plain")["rows"]
        ),
    )


def linear() -> str:
    columns = ("read ms", "nn.Linear ms", "packed ms")
    return table(
        ["type", "rows", *columns, "nn.Linear / packed"],
        (
            [
                row["dtype"],
                str(row["rows"]),
                *(number(row[column], 1) for column in columns),
                number(row["nn.Linear ms"] / row["packed ms"]),
            ]
            for row in results("linear")["rows"]
        ),
    )


def tensor_parallel() -> str:
    columns = ("one process, ms", "two processes, ms", "of it broadcast, ms", "all-reduces, ms", "gather, ms")
    return table(
        ["sequences", "tokens of each", *columns, "exchange / step"],
        (
            [
                str(row["sequences"]),
                str(row["tokens each"]),
                *(ms(row[column]) for column in columns),
                number(row["exchange / step"]),
            ]
            for row in results("tensor_parallel")["rows"]
        ),
    )


def shared_head() -> str:
    columns = [f"{held}: {what}, ms" for what in ("a Draft", "taking in") for held in ("whole", "shared")]
    return table(
        ["sequences", *columns[:2], "shared / whole", *columns[2:]],
        (
            [
                str(row["sequences"]),
                *(ms(row[column]) for column in columns[:2]),
                number(row["shared / whole"]),
                *(ms(row[column]) for column in columns[2:]),
            ]
            for row in results("shared_head")["rows"]
        ),
    )


def tensor_parallel_alone() -> str:
    alone = results("tensor_parallel")["alone_ms"]
    return table(
        ["exchange, both ranks ready", "ms"],
        ([name.replace("_", "-"), number(took)] for name, took in alone.items()),
    )


def sampling() -> str:
    rows = [row for row in results("sampling")["rows"] if row["rows"] == 5]
    sizes = distinct(rows, "vocabulary")
    step_ms = found(results("step")["rows"], sequences=1, **{"tokens each": 1})["ms"]
    lines = []
    for name in distinct(rows, "settings"):
        took = [found(rows, settings=name, vocabulary=size)["ms"] for size in sizes]
        lines.append([name, *(number(one, 1) for one in took), number(took[-1] / step_ms)])
    header = [f"vocabulary of {size:,}, ms" for size in sizes]
    return table(["settings", *header, "the last / a step of one token"], lines)
