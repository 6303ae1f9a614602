"""What settings become in each part of a deployment."""

from pathlib import Path

import pytest

from cluster.arguments import read_settings
from tests.support.settings_files import in_a_file, settings


def test_target_alone_is_drafted_for_by_ngrams() -> None:
    found = settings(target="folder")
    assert (found.drafts, found.gateway_settings().drafters) == ({}, ("ngram",))
    assert (found.gateway_settings().model, found.target_engine().dtype) == ("folder", "auto")


def test_drafter_beside_the_target_drafts_unless_others_are_named() -> None:
    given = {"target": "t", "target.drafters.eagle3.checkpoint": "h"}
    gateway = read_settings(given).gateway_settings()
    assert (gateway.drafters, gateway.target_drafters) == (("eagle3",), ("eagle3",))
    both = read_settings({**given, "draft": "d"}).gateway_settings()
    assert both.drafters == ("eagle3", "model")
    assert read_settings({**given, "gateway.drafters": '["ngram"]'}).gateway_settings().drafters == ("ngram",)


def test_layers_that_draft_are_named_or_searched() -> None:
    setting = "target.drafters.early_exit"
    found = read_settings({"target": "t", setting: "{}"}).target_engine().drafters["early_exit"]
    assert (found.layers, found.skipped_layers) == ("auto", ())
    first = read_settings({"target": "t", f"{setting}.layers": "12"}).target_engine()
    assert first.drafters["early_exit"].layers == 12
    skipping = read_settings({"target": "t", f"{setting}.skipped_layers": "[3, 5]"})
    assert skipping.target_engine().drafters["early_exit"].skipped_layers == (3, 5)
    assert skipping.gateway_settings().target_drafters == ("early_exit",)


def test_target_has_the_name_that_it_is_given() -> None:
    found = read_settings({"target": "t", "draft": "d", "target.name": "n"})
    gateway = found.gateway_settings()
    assert (gateway.model, gateway.tokenizer, gateway.drafters) == ("n", "t", ("model",))


@pytest.mark.parametrize(
    ("arguments", "quantization"),
    [
        ({}, "int4"),
        ({"drafts.model.quantization": "int8"}, "int8"),
        ({"drafts.model.quantization": "null"}, None),
        ({"target.quantization": "int8"}, "int4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", [{}, {"target": "folder"}], ids=["demo", "folder"])
def test_target_drafts_for_itself_as_a_smaller_copy(
    target: dict[str, str], arguments: dict[str, str], quantization: str | None
) -> None:
    found = read_settings({**target, "draft": "target", "target.dtype": "bfloat16", **arguments})
    target_engine, draft_engine = found.target_engine(), found.draft_engine("model")
    assert (draft_engine.model, draft_engine.dtype) == (target_engine.model, "bfloat16")
    assert draft_engine.quantization == quantization
    assert target_engine.quantization == arguments.get("target.quantization")
    assert found.drafters == ("model",)


def test_settings_of_several_drafts_keep_their_names_and_order(tmp_path: Path) -> None:
    text = "target: t\ndrafts:\n  small: {model: s, replicas: 2}\n  copy: {model: target}\n"
    found = settings(config=in_a_file(tmp_path, text))
    assert (found.draft_engine("small").model, found.draft_engine("copy").model) == ("s", "t")
    assert (found.drafts["small"].replicas, found.drafts["copy"].quantization) == (2, "int4")
    gateway = found.gateway_settings()
    assert gateway.drafters == ("small", "copy")
    assert gateway.drafts == {"small": "model", "copy": "model"}


def test_drafters_of_several_drafts_can_be_set(tmp_path: Path) -> None:
    text = """
    target: t
    drafts: {small: {model: s}, code: {model: c}}
    gateway: {drafters: [code+suffix, ngram]}
    """
    assert settings(config=in_a_file(tmp_path, text)).drafters == ("code+suffix", "ngram")


def test_draft_that_drafts_in_one_pass_is_another_drafter() -> None:
    found = settings(target="t", draft="d").with_parallel_drafts(["model"])
    assert found.gateway_settings().drafts == {"model": "parallel"}
    assert found.drafters == ("model",)


def test_models_have_their_own_settings() -> None:
    found = read_settings({"target.batch_invariant": "true", "target.step_timeout_s": "5"})
    target, draft = found.target_engine(), found.draft_engine("model")
    assert (target.batch_invariant, target.step_timeout_s) == (True, 5.0)
    assert (draft.batch_invariant, draft.step_timeout_s) == (False, 30.0)
    assert (target.draft_ahead, draft.draft_ahead) == (0, None)


def test_prompts_are_read_in_chunks_of_the_size_that_each_model_is_given() -> None:
    found = read_settings({"target.prefill_chunk": "1024", "drafts.model.prefill_chunk": "256"})
    assert found.target_engine().prefill_chunk == 1024
    assert found.draft_engine("model").prefill_chunk == 256


def test_threads_of_a_target_are_left_to_the_node_of_its_worker() -> None:
    found = read_settings({"target.tensor_parallel": "2"})
    assert (found.target_engine().tensor_parallel, found.target_engine().threads) == (2, None)
    assert (found.draft_engine("model").tensor_parallel, found.draft_engine("model").threads) == (1, 1)


def test_gateway_gets_its_limits_and_nothing_of_its_replicas() -> None:
    gateway = read_settings(
        {"gateway.max_requests": "3", "gateway.replicas": "2", "access.allow_anonymous": "true"}
    ).gateway_settings()
    assert (gateway.max_requests, gateway.allow_anonymous) == (3, True)
    assert not hasattr(gateway, "replicas")
