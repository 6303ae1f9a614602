"""What the Grafana dashboard and the Prometheus rules ask for."""

import json
from pathlib import Path

import yaml

MONITORING = Path(__file__).parent.parent.parent / "k8s" / "components" / "monitoring"


def queries_of_the_dashboard() -> dict[str, str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel["targets"]
    }


def rules() -> list[dict[str, str]]:
    manifest = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("PrometheusRule", "outrider")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


QUERIES = queries_of_the_dashboard() | {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
