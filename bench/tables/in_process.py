"""Tables of measurements in one process: drafting, steps, the choice of tokens, and equal texts."""

from bench.tables.reading import KINDS, Row, distinct, found, number, results, table


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


def identity() -> str:
    rows = results("identity")["rows"]
    kinds = list(dict.fromkeys((row["dtype"], is_batch_invariant(row)) for row in rows))
    by_way = {(row["way"], row["dtype"], is_batch_invariant(row)): str(row["differ"]) for row in rows}
    header = [f"{dtype}, batch-invariant" if invariant else dtype for dtype, invariant in kinds]
    return table(
        [f"differ of {rows[0]['requests']}", *header],
        ([way, *(by_way.get((way, *kind), "") for kind in kinds)] for way in distinct(rows, "way")),
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


def idle_head() -> str:
    return table(
        ["streams", "ms of a step", "ms beside an idle head", "ratio"],
        (
            [
                str(row["streams"]),
                number(row["ms"], 1),
                number(row["ms with the head"], 1),
                number(row["ratio"], 3),
            ]
            for row in results("idle_head")["rows"]
        ),
    )
