"""Prometheus text of one gateway."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.telemetry import exposition
from outrider.telemetry.exposition import Exposition
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_GATEWAYS, Metric

VLLM = {"model_name": "m", "engine": "0"}


class RecordedOfRay:
    """Instrument that keeps what Ray would be told."""

    def __init__(self, metric: Metric, recorded: list[Any]) -> None:
        def keeps(kind: str) -> Any:
            return lambda value, tags: recorded.append((metric.name, kind, value, tags))

        self.inc, self.set, self.observe = keeps("inc"), keeps("set"), keeps("observe")


@pytest.fixture
def of_ray(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Values that reach Ray's exporter."""
    recorded: list[Any] = []
    monkeypatch.setattr(exposition, "ray_instrument", lambda metric: RecordedOfRay(metric, recorded))
    return recorded


def samples(text: bytes) -> dict[str, tuple[float, dict[str, str]]]:
    families = text_string_to_metric_families(text.decode())
    return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def test_text_has_vllms_names_and_the_gateway_that_recorded(of_ray: list[Any]) -> None:
    text = Exposition("one")
    instruments = Instruments(OF_GATEWAYS, text.instrument)
    instruments.total("vllm_generation_tokens", 7, **VLLM)
    instruments.total("vllm_generation_tokens", 9, **VLLM)
    instruments.add("vllm_prompt_tokens", 3, **VLLM)
    instruments.add("vllm_prompt_tokens", 0, **VLLM)
    instruments.set("outrider_requests_running", 2)
    instruments.observe("vllm_time_to_first_token_seconds", 0.3, **VLLM)
    found = samples(text.text())
    assert found["vllm:generation_tokens_total"] == (9.0, {**VLLM, "gateway": "one"})
    assert found["vllm:prompt_tokens_total"] == (3.0, {**VLLM, "gateway": "one"})
    assert found["outrider_requests_running"] == (2.0, {"gateway": "one"})
    assert found["vllm:time_to_first_token_seconds_sum"][0] == 0.3
    assert found["vllm:time_to_first_token_seconds_count"][0] == 1.0
    assert not [name for name in found if name.endswith("_created")]
    assert of_ray == [
        ("vllm_generation_tokens", "inc", 7, VLLM),
        ("vllm_generation_tokens", "inc", 2, VLLM),
        ("vllm_prompt_tokens", "inc", 3, VLLM),
        ("outrider_requests_running", "set", 2, {}),
        ("vllm_time_to_first_token_seconds", "observe", 0.3, VLLM),
    ]
