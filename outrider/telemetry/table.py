"""Writes the tables of docs/metrics.md: ``python -m outrider.telemetry.table``."""

from pathlib import Path

from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS, Metric
from outrider.telemetry.reasons import DepthReason

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
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


def reasons() -> str:
    rows = [f"| `{reason}` | {reason.meaning} |" for reason in DepthReason]
    return "\n".join(["| `reason` | what decides the depth |", "|---|---|", *rows, ""])


def rewritten(page: str) -> str:
    """Returns the page with the tables between their two marks. Raises ValueError if a mark is missing."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE.name} has lost the marks of the metrics tables")
    return f"{before}{BEGIN}{table()}\n{reasons()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
