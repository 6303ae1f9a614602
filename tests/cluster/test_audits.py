"""A real service whose answers are each computed again, by the target that did not give them."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.patience import LIMIT_S, wait_until
from tests.support.running import Service, serving
from tests.support.served import SERVED

pytestmark = pytest.mark.slow

ANSWERS = 8


def audits(service: Service) -> dict[str, float]:
    """Returns how many answers were audited, by outcome."""
    families = text_string_to_metric_families(httpx.get(service.metrics, timeout=LIMIT_S).text)
    return {
        sample.labels["outcome"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "ray_outrider_audits_total"
    }


def test_service_with_audits_finds_every_answer_the_same_at_the_other_target(tmp_path: Path) -> None:
    settings = {**SERVED, "target.replicas": 2, "gateway.audit.fraction": 1.0}
    with serving(tmp_path, settings) as service:
        for seed in range(ANSWERS):
            body = {"prompt": '{"name": "', "max_tokens": 40, "temperature": 0.8, "seed": seed}
            answer = httpx.post(f"{service.http}/v1/completions", json=body, timeout=LIMIT_S)
            assert answer.status_code == 200, answer.text
        wait_until(lambda: audits(service) == {"same": ANSWERS}, what=lambda: f"{audits(service)}")
