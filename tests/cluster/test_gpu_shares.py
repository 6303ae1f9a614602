"""Shares of GPUs that settings leave open."""

import pytest

from cluster.arguments import read_settings


@pytest.mark.parametrize(
    ("gpus", "arguments", "shares"),
    [
        (0, {}, (0.0, 0.0)),
        (1, {}, (1.0,)),
        (1, {"target.gpus": 1.0}, (1.0,)),
        (1, {"drafts.model.gpus": 0.5}, (0.5, 0.5)),
        (2, {}, (1.0, 1.0)),
        (2, {"target.replicas": 2}, (0.5, 0.5)),
        (8, {"target.replicas": 4}, (1.0, 1.0)),
        (4, {"target.gpus": 1.0}, (1.0, 1.0)),
        (1, {"target.gpus": 0.75}, (0.75, 0.25)),
        (1, {"target.gpus": 0.3, "target.replicas": 2}, (0.3, 0.4)),
        (2, {"target.gpus": 0.5, "target.replicas": 3}, (0.5, 0.5)),
        (4, {"target.tensor_parallel": 4, "target.gpus": 0.9}, (0.9, 0.1)),
        (4, {"target.tensor_parallel": 2, "target.replicas": 2, "drafts.model.gpus": 0.0}, (1.0, 0.0)),
        (4, {"drafts.model.gpus": 0.0}, (1.0, 0.0)),
        (0, {"target.tensor_parallel": 2}, (0.0, 0.0)),
        (3, {"target.tensor_parallel": 2}, (1.0, 1.0)),
        (3, {"target.tensor_parallel": 2, "drafts.model.replicas": 2}, (1.0, 0.5)),
        (4, {"target.tensor_parallel": 2, "target.gpus": 0.0}, (0.0, 1.0)),
        (1, {"drafts.model.threads": 1, "drafts.code.threads": 1}, (1 / 3, 1 / 3, 1 / 3)),
        (3, {"drafts.model.gpus": 0.5, "drafts.code.threads": 1}, (1.0, 0.5, 1.0)),
    ],
    ids=str,
)
def test_gpus_are_shared_where_nothing_else_is_said(
    gpus: int, arguments: dict[str, float], shares: tuple[float, ...]
) -> None:
    found = read_settings(arguments).with_gpus(gpus)
    assert (found.target.gpus, *(draft.gpus for draft in found.drafts.values())) == shares


@pytest.mark.parametrize(
    ("gpus", "arguments", "drafters"),
    [
        (0, {}, ("colocated", "dflash", "model")),
        (0, {"target.drafters.eagle3": "{}"}, ("eagle3",)),
        (0, {"target.drafters.eagle3": "{}", "target.drafters.medusa": "{}"}, ("eagle3", "medusa")),
        (0, {"gateway.drafters": '["model"]'}, ("model",)),
        (0, {"drafts.model.resources": '{"cheap": 1}'}, ("model",)),
        (0, {"drafts.model.threads": 1, "drafts.code.threads": 1}, ("model", "code")),
        (1, {}, ("colocated", "dflash")),
        (1, {"drafts.model.quantization": "int4"}, ("colocated", "dflash")),
        (1, {"drafts.model.gpus": 0.5}, ("model",)),
        (1, {"drafts.model.max_replicas": 2}, ("model",)),
        (1, {"drafts.model.dtype": "bfloat16"}, ("model",)),
        (1, {"drafts.model.worker_drafter": "model"}, ("model",)),
        (0, {"drafts.model.worker_drafter": "model"}, ("model",)),
        (1, {"target.gpus": 0.5}, ("model",)),
        (1, {"target.gpus": 0.0, "drafts.model.gpus": 0.0}, ("colocated", "dflash", "model")),
        (2, {}, ("model",)),
    ],
    ids=str,
)
def test_with_gpus_draft_that_shares_the_targets_device_gets_a_place_in_its_process(
    gpus: int, arguments: dict[str, object], drafters: tuple[str, ...]
) -> None:
    found = read_settings(arguments).with_gpus(gpus)
    assert found.drafters == drafters
    assert found.gateway_settings().drafters == drafters


def test_with_gpus_colocated_draft_keeps_its_model_and_its_quantization() -> None:
    engine = read_settings({"drafts.model.quantization": "int4"}).with_gpus(0).target_engine()
    own = engine.drafters["colocated"]
    assert own.quantization == "int4"
    assert own.checkpoint is not None
    assert own.checkpoint.endswith("draft")


@pytest.mark.parametrize(
    ("gpus", "arguments"),
    [
        (4, {"target.tensor_parallel": 4}),
        (4, {"target.tensor_parallel": 2, "target.replicas": 2}),
        (3, {"target.tensor_parallel": 4}),
        (2, {"target.gpus": 1.0, "target.max_replicas": 2}),
    ],
    ids=str,
)
def test_with_gpus_without_a_share_for_a_draft_is_refused(gpus: int, arguments: dict[str, float]) -> None:
    found = read_settings(arguments)
    with pytest.raises(
        ValueError, match=r"^drafts\.model\.gpus is left open, and .* fewer target"
    ) as refused:
        found.with_gpus(gpus)
    assert f"of the cluster's {gpus} GPUs" in str(refused.value)
    accepted = read_settings({**arguments, "drafts.model.gpus": 0.0}).with_gpus(gpus)
    assert accepted.drafts["model"].gpus == 0.0
    if gpus == 4:
        assert read_settings({**arguments, "target.gpus": 0.9}).with_gpus(gpus).drafts["model"].gpus == 0.1


@pytest.mark.parametrize(
    ("gpus", "arguments", "gateways"),
    [
        (0, {"target.replicas": 2}, 1),
        (1, {}, 2),
        (1, {"target.gpus": 0.5}, 2),
        (2, {"target.gpus": 0.0}, 1),
        (5, {"target.tensor_parallel": 4}, 2),
        (9, {"target.tensor_parallel": 4, "target.max_replicas": 2}, 4),
        (1, {"gateway.replicas": 1}, 1),
        (0, {"gateway.replicas": 3}, 3),
    ],
    ids=str,
)
def test_with_gpus_gateways_are_as_many_as_targets_on_gpus_feed(
    gpus: int, arguments: dict[str, float], gateways: int
) -> None:
    assert read_settings(arguments).with_gpus(gpus).gateway.replicas == gateways
