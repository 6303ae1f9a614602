"""Tables of metrics in docs/metrics.md."""

from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS, Metric
from outrider.telemetry.reasons import DepthReason
from workshop.markdown import table
from workshop.pages.marks import COMMAND, DOCS, rewritten

PAGE, MARK = "metrics.md", "metrics"


def metrics() -> str:
    """Returns a Markdown table with a row for each metric."""
    rows = [_row(metric, "gateway") for metric in OF_GATEWAYS] + [
        _row(metric, "worker") for metric in OF_WORKERS
    ]
    return table(["metric", "kind, unit", "meaning", "labels", "of each"], rows)


def _row(metric: Metric, owner: str) -> list[str]:
    name = f"ray_{metric.name}" + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return [f"`{name}`", f"{metric.kind}, {metric.unit}", metric.meaning, labels, owner]


def reasons() -> str:
    """Returns a Markdown table with a row for each reason of a depth."""
    rows = [[f"`{reason}`", reason.meaning] for reason in DepthReason]
    return table(["`reason`", "what decides the depth"], rows)


def pages() -> dict[str, str]:
    """Returns the rewritten page by its name. Raises ValueError if the page has lost its marks."""
    return {PAGE: rewritten((DOCS / PAGE).read_text(), MARK, COMMAND, f"{metrics()}\n{reasons()}")}
