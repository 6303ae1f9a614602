"""Settings as arguments and files give them, and what each part of a deployment makes of them."""

from pathlib import Path
from typing import Any

import pytest

from cluster.arguments import SettingsError, read_settings
from cluster.settings import DEMO_NAME, DEMO_PARALLEL, DEMO_SMALL, DEMO_SMALL_NAME, Settings
from outrider.demo import written_out
from outrider.demo.prompts import DEMO
from tests.support.demo_pair import DRAFTERS


def settings(**arguments: Any) -> Settings:
    return read_settings(arguments)


def in_a_file(folder: Path, text: str) -> str:
    file = folder / "outrider.yaml"
    file.write_text(text)
    return str(file)


# What they say


def test_file_holds_groups(tmp_path: Path) -> None:
    text = """
    target:
      model: t
      tensor_parallel: 4
      resources: {big: 1}
    drafts:
      model: {model: d, quantization: int8}
    gateway: {max_requests: 3}
    pace: {max_depth: 3}
    """
    found = settings(config=in_a_file(tmp_path, text))
    assert (found.target.model, found.target.tensor_parallel) == ("t", 4)
    assert found.target.resources == {"big": 1.0}
    assert (found.drafts["model"].model, found.drafts["model"].quantization) == ("d", "int8")
    assert (found.gateway.max_requests, found.pace.max_depth) == (3, 3)


def test_arguments_are_text_by_path() -> None:
    found = read_settings(
        {
            "target.model": "t",
            "target.batch_invariant": "true",
            "target.gpus": "0.5",
            "target.resources": '{"big": 1, "node:10.0.0.1": 0.1}',
            "drafts.model.model": "d",
            "gateway.max_requests": "64",
            "pace": '{"max_depth": 4}',
            "tls.key": "file.pem",
        }
    )
    assert (found.target.model, found.target.batch_invariant, found.target.gpus) == ("t", True, 0.5)
    assert found.target.resources == {"big": 1.0, "node:10.0.0.1": 0.1}
    assert found.drafts["model"].model == "d"
    assert (found.gateway.max_requests, found.pace.max_depth, found.tls.key) == (64, 4, "file.pem")


@pytest.mark.parametrize("as_a_file", [False, True], ids=["arguments", "file"])
def test_target_and_draft_have_short_forms(as_a_file: bool, tmp_path: Path) -> None:
    file = in_a_file(tmp_path, "target: t\ndraft: d\n")
    found = settings(config=file) if as_a_file else settings(target="t", draft="d")
    assert (found.target.model, found.drafts["model"].model) == ("t", "d")


def test_short_form_goes_with_other_settings_of_its_group() -> None:
    found = read_settings({"target": "t", "target.threads": "2", "drafts.model.threads": "3", "draft": "d"})
    assert (found.target.model, found.target.threads) == ("t", 2)
    assert (found.drafts["model"].model, found.drafts["model"].threads) == ("d", 3)


def test_arguments_win_setting_by_setting(tmp_path: Path) -> None:
    text = "target: {model: t, threads: 6, resources: {big: 1}, quantization: int8}\ndraft: d\n"
    arguments = {"target.threads": "2", "target.resources": '{"large": 2}', "target.quantization": "null"}
    found = read_settings({"config": in_a_file(tmp_path, text), "drafts.model.threads": "3", **arguments})
    assert (found.target.model, found.target.threads, found.target.quantization) == ("t", 2, None)
    assert found.target.resources == {"large": 2.0}  # one setting, replaced as a whole
    assert (found.drafts["model"].model, found.drafts["model"].threads) == ("d", 3)


def test_group_of_a_file_may_be_empty(tmp_path: Path) -> None:
    assert settings(config=in_a_file(tmp_path, "target:\ndrafts:\n  model:\n")) == settings()


def test_folder_gives_the_settings_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("target: t\ndraft: d\n")
    (tmp_path / "counts.yaml").write_text("target: {replicas: 6}\ndrafts: {model: {replicas: 5}}\n")
    (tmp_path / "notes.txt").write_text("no settings")
    found = read_settings({"config": str(tmp_path), "target.replicas": "2"})
    assert (found.target.model, found.target.replicas) == ("t", 2)
    assert (found.drafts["model"].model, found.drafts["model"].replicas) == ("d", 5)


# What follows from them


def test_demo_target_is_served_at_a_realistic_cost_when_no_model_is_named() -> None:
    found = settings()
    assert found.target_engine().dtype == found.draft_engine("model").dtype == "float32"
    assert found.target_engine().model == str(written_out.target())
    assert found.draft_engine("model").model == str(DEMO / "draft")
    assert (found.gateway_settings().model, found.has_written_out_demo) == (DEMO_NAME, True)


def test_written_out_target_has_a_small_cache_unless_another_is_named() -> None:
    assert settings().target_engine().cache_memory == 2**28
    assert read_settings({"target.cache_memory": "1000000"}).target_engine().cache_memory == 10**6


def test_gateway_of_the_written_out_target_reads_the_tokenizer_that_every_node_has() -> None:
    assert settings().gateway_settings().tokenizer == str(DEMO / "target")


def test_small_demo_target_is_served_as_it_was_trained() -> None:
    found = settings(target=DEMO_SMALL)
    assert found.target_engine().dtype == found.draft_engine("model").dtype == "float32"
    assert found.target_engine().model == found.gateway_settings().tokenizer == str(DEMO / "target")
    assert found.draft_engine("model").model == str(DEMO / "draft")
    assert (found.gateway_settings().model, found.has_written_out_demo) == (DEMO_SMALL_NAME, False)


def test_demo_pair_accepts_any_setting() -> None:
    found = read_settings({"target.dtype": "bfloat16", "drafts.model.threads": "2"})
    assert (found.target_engine().dtype, found.draft_engine("model").dtype) == ("bfloat16", "float32")
    assert (found.draft_engine("model").model, found.draft_engine("model").threads) == (
        settings().draft_engine("model").model,
        2,
    )


@pytest.mark.parametrize("drafter", ["eagle3", "medusa"])
def test_demo_target_has_heads_by_name(drafter: str) -> None:
    found = read_settings({"target": DEMO_SMALL, "target.drafter": drafter})
    assert found.target_engine().head == str(DRAFTERS / drafter)
    assert (found.drafts, found.drafters) == ({}, (drafter,))
    assert (
        read_settings({"target": DEMO_SMALL, "target.drafter": drafter, "target.head": "own"}).target.head
        == "own"
    )
    assert read_settings({"target": "folder", "target.drafter": drafter}).target.head is None


def test_written_out_demo_target_has_heads_of_its_size_by_name() -> None:
    found = read_settings({"target.drafter": "eagle3"})
    assert found.target_engine().head == str(written_out.target().with_name("eagle3"))
    assert read_settings({"target.drafter": "colocated", "target.head": "own"}).target.head == "own"


def test_demo_target_has_a_parallel_draft_by_name() -> None:
    found = read_settings({"draft": DEMO_PARALLEL}).draft_engine("model")
    assert (found.model, found.dtype) == (str(DRAFTERS / "parallel"), "float32")


def test_target_alone_is_drafted_for_by_ngrams() -> None:
    found = settings(target="folder")
    assert (found.drafts, found.gateway_settings().drafters) == ({}, ("ngram",))
    assert (found.gateway_settings().model, found.target_engine().dtype) == ("folder", "auto")


def test_drafter_beside_the_target_drafts_unless_others_are_named() -> None:
    given = {"target": "t", "target.drafter": "eagle3", "target.head": "h"}
    gateway = read_settings(given).gateway_settings()
    assert (gateway.drafters, gateway.beside_target) == (("eagle3",), "eagle3")
    both = read_settings({**given, "draft": "d"}).gateway_settings()
    assert both.drafters == ("eagle3", "model")
    assert read_settings({**given, "gateway.drafters": '["ngram"]'}).gateway_settings().drafters == ("ngram",)


def test_layers_that_draft_are_named_or_searched() -> None:
    given = {"target": "t", "target.drafter": "early_exit"}
    engine = read_settings(given).target_engine()
    assert (engine.drafter, engine.early_exit, engine.skipped_layers) == ("early_exit", "auto", ())
    assert read_settings({**given, "target.early_exit": "12"}).target_engine().early_exit == 12
    skipping = read_settings({**given, "target.skipped_layers": "[3, 5]"})
    assert skipping.target_engine().skipped_layers == (3, 5)
    assert skipping.gateway_settings().beside_target == "early_exit"


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


def test_several_drafts_have_names_and_draft_in_that_order(tmp_path: Path) -> None:
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
    assert (target.draft_ahead, draft.draft_ahead) == (0, 12)


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
        (0, {}, ("colocated", "model")),
        (0, {"target.drafter": "eagle3"}, ("eagle3",)),
        (0, {"gateway.drafters": '["model"]'}, ("model",)),
        (0, {"drafts.model.resources": '{"cheap": 1}'}, ("model",)),
        (0, {"drafts.model.threads": 1, "drafts.code.threads": 1}, ("model", "code")),
        (1, {}, ("colocated",)),
        (1, {"drafts.model.quantization": "int4"}, ("colocated",)),
        (1, {"drafts.model.gpus": 0.5}, ("model",)),
        (1, {"drafts.model.max_replicas": 2}, ("model",)),
        (1, {"drafts.model.dtype": "bfloat16"}, ("model",)),
        (1, {"drafts.model.worker_drafter": "model"}, ("model",)),
        (0, {"drafts.model.worker_drafter": "model"}, ("model",)),
        (1, {"target.gpus": 0.5}, ("model",)),
        (1, {"target.gpus": 0.0, "drafts.model.gpus": 0.0}, ("colocated", "model")),
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
    assert (engine.drafter, engine.head_quantization) == ("colocated", "int4")
    assert engine.head is not None
    assert engine.head.endswith("draft")


# What is refused


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
    ("name", "value", "told"),
    [
        ("target.tensor_parallel", "x", "target.tensor_parallel='x' should be a valid integer: devices that"),
        (
            "target.replicas",
            "0",
            "target.replicas='0' should be greater than or equal to 1: first and least number of replicas",
        ),
        (
            "gateway.drafters",
            '["magic"]',
            "gateway.drafters=('magic',): there is no drafter 'magic'; there are: model, ngram",
        ),
        ("target.dtype", "int8", "target.dtype='int8' should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("target.cache_memory", "all", "='all' should be a valid integer or be a valid number: memory for"),
        ("target.placement", "PACKED", "target.placement='PACKED' should be 'STRICT_PACK', 'PACK'"),
        ("target.resources", '{"big": "x"}', "target.resources.big='x' should be a valid number"),
        ("target.resources", "{", "target.resources='{' is no JSON"),
        ("target", '{"model": 1}', "target.model=1 should be a valid string: local checkpoint folder"),
        ("drafts", "x", "drafts='x' should hold settings by name"),
        ("drafts.model", "x", "drafts.model='x' should hold settings by name"),
        ("drafts.model.quantization", "int3", "drafts.model.quantization='int3' should be 'int8' or"),
        ("drafts.Not a name.model", "x", "drafts.Not a name='Not a name' should match pattern"),
        ("pace", '{"max_depth": 17}', "pace.max_depth=17 should be less than or equal to 16: drafted tokens"),
        ("pace.on_above", "0.1", "pace.on_above must be at least off_below"),
        ("addresses.http_port", "0", "addresses.http_port='0' should be greater than or equal to 1"),
    ],
)
def test_wrong_value_is_named_by_its_path_with_what_would_be_accepted(
    name: str, value: str, told: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({name: value})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("target.tensor_paralel", "target.tensor_paralel='1' is no setting: target.tensor_parallel is one"),
        ("drafts.small.quantisation", "drafts.small.quantization is one"),
        ("drafs.default.model", "is no setting: drafts or draft is one"),
        ("tensor_parallel", "tensor_parallel='1' is no setting: target.tensor_parallel is one"),
        (
            "quantization",
            "target.quantization or drafts.model.quantization or target.head_quantization is one",
        ),
        ("confg", "config is one"),
        ("tls.pem", "tls.pem='1' is no setting: tls has certificate, key, authority"),
        ("zzz", "zzz='1' is no setting: a deployment has target, drafts, gateway, pace"),
    ],
)
def test_unknown_setting_is_refused_with_those_that_are_near(name: str, told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({name: "1"})
    assert told in str(refused.value)


def test_settings_refusal_names_all_wrong_values() -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({"target.gpu": "1", "gateway.max_requests": "many", "drafts.model.threads": "0"})
    lines = str(refused.value).splitlines()
    assert sorted(line.partition("=")[0] for line in lines) == [
        "drafts.model.threads",
        "gateway.max_requests",
        "target.gpu",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"target.gpus": "0.5", "target.tensor_parallel": "2"},
            r"target\.gpus=0\.5 with tensor_parallel=2: give each rank 1, above 0\.5",
        ),
        (
            {"target.gpus": "4", "target.tensor_parallel": "2"},
            r"target\.gpus=4 with tensor_parallel=2: give each rank 1",
        ),
        (
            {"target.gpus": "4"},
            r"target\.gpus=4 with tensor_parallel=1: .* give tensor_parallel=4 gpus=1 or at most 1",
        ),
        ({"target.gpus": "1.5"}, r"target\.gpus=1\.5 with tensor_parallel=1: .* give at most 1"),
        ({"drafts.model.gpus": "2"}, r"drafts\.model\.gpus=2: a draft uses one GPU; give at most 1"),
        ({"target.replicas": "2", "target.max_replicas": "1"}, r"target\.max_replicas=1 is below replicas=2"),
        (
            {"drafts.model.replicas": "2", "drafts.model.max_replicas": "1"},
            r"drafts\.model\.max_replicas=1 is below replicas=2",
        ),
        (
            {"target": "t", "target.early_exit": "12"},
            r"target\.early_exit=12 is for drafter=early_exit, and drafter=None",
        ),
        (
            {"target": "t", "target.drafter": "early_exit", "target.early_exit": "12"}
            | {"target.skipped_layers": "[1]"},
            r"target\.skipped_layers=\[1\] with early_exit=12: give one of them",
        ),
        ({"target": "t", "target.head": "h"}, r"target\.head='h' is a drafter's: name that as drafter"),
        (
            {"target": "t", "target.drafter": "eagle3", "gateway.drafters": '["medusa"]'},
            r"gateway\.drafters=\('medusa',\): 'medusa' would stand beside the target, and there is 'eagle3'",
        ),
        (
            {"target": "t", "gateway.drafters": '["medusa"]'},
            r"gateway\.drafters=\('medusa',\): 'medusa' would stand beside the target, and there is none",
        ),
        ({"drafts.suffix.model": "d"}, r"drafts\.suffix has the name of something else: give the draft"),
        ({"drafts.auto.model": "d"}, r"drafts\.auto has the name of something else: give the draft"),
        ({"target": "t", "target.model": "u"}, r"target\.model is given twice"),
        ({"target": "t", "drafts.model.quantization": "int8"}, r"drafts\.model\.model is missing: local"),
    ],
    ids=str,
)
def test_settings_that_contradict_one_another_are_named(arguments: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        read_settings(arguments)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("taget: t", "taget='t' is no setting: target is one"),
        ("pace: {max_depth: 99}", "pace.max_depth=99 should be"),
        ("- drafts", "settings by name"),
        ("config: x", "no other config"),
        ("target: {", "cannot be read"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(config=in_a_file(tmp_path, text))
    assert told in str(refused.value)


def test_setting_in_two_files_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("target: {model: t, replicas: 6}\n")
    (tmp_path / "b.yaml").write_text("target: {threads: 2, replicas: 5}\n")
    with pytest.raises(SettingsError, match=r"b\.yaml sets target\.replicas again"):
        settings(config=str(tmp_path))


def test_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"without \*\.yaml"):
        settings(config=str(tmp_path))


def test_missing_file_is_named() -> None:
    with pytest.raises(SettingsError, match="config='nowhere"):
        settings(config="nowhere.yaml")
