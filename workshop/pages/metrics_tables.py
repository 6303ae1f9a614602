"""Tables of metrics in docs/metrics.md."""

from outrider.telemetry.metrics import OF_GATEWAYS, OF_WORKERS, Metric
from outrider.telemetry.reasons import DepthReason
from workshop.markdown import table
from workshop.pages.marks import COMMAND, DOCS, rewritten

PAGE, MARK = "metrics.md", "metrics"


def metrics() -> str:
    """Returns a row for each metric, in Markdown."""
    rows = [_row(metric, "gateway") for metric in OF_GATEWAYS] + [
        _row(metric, "worker") for metric in OF_WORKERS
    ]
    return table(["metric", "kind, unit", "meaning", "labels", "of each"], rows)


def _row(metric: Metric, owner: str) -> list[str]:
    name = f"ray_{metric.name}" + ("_total" if metric.kind == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return [f"`{name}`", f"{metric.kind}, {metric.unit}", metric.meaning, labels, owner]


def reasons() -> str:
    """Returns a row for each reason of a depth, in Markdown."""
    rows = [[f"`{reason}`", reason.meaning] for reason in DepthReason]
    return table(["`reason`", "what decides the depth"], rows)


def pages() -> dict[str, str]:
    """Returns the page by its name, rewritten. Raises ValueError if it has lost its marks."""
    return {PAGE: rewritten((DOCS / PAGE).read_text(), MARK, COMMAND, f"{metrics()}\n{reasons()}")}
