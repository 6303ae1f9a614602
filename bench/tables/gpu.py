"""The engine on a GPU: its steps, plain and drafted text, and prompts."""

from bench.tables.reading import distinct, found, number, results, table


def gpu_steps() -> str:
    rows = results("gpu")["steps"]
    models, lines = distinct(rows, "model"), []
    for row in (row for row in rows if row["model"] == models[0]):
        shape = {key: row[key] for key in ("asked", "sequences", "tokens each", "draft", "sampling")}
        drafted = " tree" if row["draft"] == "tree" else ""
        of_models = [found(rows, model=model, **shape) for model in models]
        cells = [cell for row in of_models for cell in (number(row["ms"], 1), number(_share(row)))]
        told = f"{row['sequences']} x {row['tokens each']}{drafted}"
        lines.append([told, row["sampling"], row["asked"].replace("_", "-"), *cells])
    header = ["sequences x tokens", "choice", "asked for"]
    return table([*header, *(cell for model in models for cell in (f"{model}, ms", "of the limit"))], lines)


def _share(row: dict[str, float]) -> float:
    return row["share of the bandwidth limit"]


def gpu_speculation() -> str:
    rows = results("gpu")["speculation"]
    ours = [row for row in rows if "numerics" in row]
    depths = distinct(ours, "depth")
    header = ["model", "sequences", "numerics", "plain tokens/s", "to generate"]
    header += [f"K = {depth}, to plain" for depth in depths if depth]
    lines = []
    for model in distinct(ours, "model"):
        for batch in distinct(ours, "batch"):
            theirs = found(rows, model=model, batch=batch, depth="transformers")["tokens/s"]
            for numerics in distinct(ours, "numerics"):
                of = [found(ours, model=model, batch=batch, numerics=numerics, depth=d) for d in depths]
                rate = of[0]["tokens/s"]
                ratios = [number(row["to plain"]) for row in of[1:]]
                lines.append(
                    [model, str(batch), numerics, number(rate, 0), number(rate / theirs, 1), *ratios]
                )
    return table(header, lines)
