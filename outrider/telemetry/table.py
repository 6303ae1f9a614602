"""The README's table of metrics: ``python -m outrider.telemetry.table`` writes it."""

from pathlib import Path

from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS, Metric

BEGIN, END = "<!-- metrics: written by python -m outrider.telemetry.table -->\n", "<!-- end of metrics -->\n"


def table() -> str:
    rows = [_row(metric, "gateway") for metric in OF_GATEWAYS] + [
        _row(metric, "worker") for metric in OF_WORKERS
    ]
    return "\n".join(
        ["| metric | kind, unit | meaning | labels | of each |", "|---|---|---|---|---|", *rows, ""]
    )


def _row(metric: Metric, owner: str) -> str:
    name = f"ray_{metric.name}" + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind}, {metric.unit} | {metric.meaning} | {labels} | {owner} |"


def rewritten(readme: str) -> str:
    """With the table between its two marks. Raises ValueError if they are missing."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("README.md has lost the marks of the metrics table")
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "README.md"
    path.write_text(rewritten(path.read_text()))
