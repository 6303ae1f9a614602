"""One set of settings, resolved into those of each part."""

import pytest
from pydantic import ValidationError

from cluster.settings import DEMO_NAME, Settings


def test_the_demo_pair_is_served_in_float32_when_no_model_is_named():
    settings = Settings().resolved()
    assert settings.target_engine().dtype == "float32"
    assert settings.target_engine().model.endswith("outrider/demo/pair/target")
    assert settings.draft_engine().model.endswith("outrider/demo/pair/draft")
    assert settings.gateway().model == DEMO_NAME


def test_a_target_alone_is_drafted_for_by_ngrams():
    settings = Settings(target="folder").resolved()
    assert (settings.draft, settings.gateway().drafter) == (None, "ngram")
    assert (settings.gateway().model, settings.target_engine().dtype) == ("folder", "auto")


def test_what_is_named_is_kept():
    settings = Settings(target="t", draft="d", name="n", dtype="bfloat16", target_threads=3).resolved()
    assert (settings.name, settings.drafter) == ("n", "model")
    assert (settings.target_engine().threads, settings.draft_engine().dtype) == (3, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "quantization"),
    [({}, "int4"), ({"draft_quantization": "int8"}, "int8"), ({"target_quantization": "int8"}, "int4")],
)
def test_the_target_drafts_for_itself_as_a_smaller_copy(fields, quantization):
    settings = Settings(target="folder", draft="target", **fields).resolved()
    assert (settings.draft_engine().model, settings.draft_engine().quantization) == ("folder", quantization)
    assert settings.target_engine().quantization == fields.get("target_quantization")
    assert settings.drafter == "model"


def test_the_demo_target_may_draft_for_itself_too():
    settings = Settings(draft="target").resolved()
    assert settings.draft == settings.target


def test_batch_invariant_numerics_are_the_targets():
    settings = Settings(batch_invariant=True).resolved()
    assert (settings.target_engine().batch_invariant, settings.draft_engine().batch_invariant) == (
        True,
        False,
    )


def test_a_quantization_of_no_draft_is_refused():
    with pytest.raises(ValueError, match=r"draft_quantization='int8' needs a draft"):
        Settings(target="folder", draft_quantization="int8").resolved()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dept": "4"},
        {"drafts": "x"},
        {"pace": '{"max_depth": 17}'},
        {"pace": '{"of_below": 0.5}'},
        {"dtype": "int8"},
        {"draft_quantization": "int3"},
        {"http_port": "0"},
        {"target_resources": "{"},
        {"target_placement": "PACKED"},
        {"target_gpus": 0.5, "tensor_parallel": 2},
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Settings.model_validate(wrong)


def test_the_ranks_of_a_target_share_what_it_may_use(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    engine = Settings(tensor_parallel=2).resolved().target_engine()
    assert (engine.tensor_parallel, engine.threads) == (2, 4)
    assert Settings(tensor_parallel=2).resolved().draft_engine().tensor_parallel == 1


def test_what_counts_as_hanging_is_the_same_for_every_worker():
    settings = Settings(load_timeout_s=60, step_timeout_s=5).resolved()
    for engine in (settings.target_engine(), settings.draft_engine()):
        assert (engine.load_timeout_s, engine.step_timeout_s) == (60.0, 5.0)


def test_a_file_gives_settings_and_arguments_win(tmp_path):
    file = tmp_path / "outrider.yaml"
    file.write_text("target: t\ndrafts: 6\npace: {max_depth: 3}\ntarget_resources: {big: 1}\n")
    settings = Settings(config=str(file), drafts=2).resolved()
    assert (settings.target, settings.drafts, settings.target_resources) == ("t", 2, {"big": 1.0})
    assert settings.pace.max_depth == 3


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drafs: 4", "drafs"),
        ("pace: {max_depth: 99}", "max_depth"),
        ("- drafts", "settings by name"),
        ("config: x", "no other config"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, named):
    file = tmp_path / "outrider.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=named):
        Settings(config=str(file)).resolved()


def test_a_folder_gives_the_settings_of_all_its_files(tmp_path):
    (tmp_path / "models.yaml").write_text("target: t\n")
    (tmp_path / "counts.yaml").write_text("drafts: 6\n")
    (tmp_path / "notes.txt").write_text("no settings")
    settings = Settings(config=str(tmp_path), drafts=2).resolved()
    assert (settings.target, settings.drafts) == ("t", 2)


def test_a_setting_in_two_files_of_a_folder_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("drafts: 6\ntarget: t\n")
    (tmp_path / "b.yaml").write_text("drafts: 5\n")
    with pytest.raises(ValueError, match=r"b\.yaml sets drafts again"):
        Settings(config=str(tmp_path)).resolved()


def test_a_folder_without_settings_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without \*\.yaml"):
        Settings(config=str(tmp_path)).resolved()


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match="config='nowhere"):
        Settings(config="nowhere.yaml").resolved()


def test_the_gateway_gets_its_limits():
    gateway = (
        Settings(max_requests=3, max_waiting=2, max_prompt_tokens=10, request_deadline_s=9)
        .resolved()
        .gateway()
    )
    assert (gateway.max_running, gateway.max_waiting) == (3, 2)
    assert (gateway.max_prompt_tokens, gateway.request_deadline_s) == (10, 9.0)


def test_resources_are_written_as_json_on_the_command_line():
    assert Settings.model_validate({"draft_resources": '{"cheap": 0.5}'}).draft_resources == {"cheap": 0.5}


@pytest.mark.parametrize(
    ("gpus", "fields", "shares"),
    [
        (0, {}, (0.0, 0.0)),
        (1, {}, (0.5, 0.5)),
        (2, {}, (1.0, 1.0)),
        (2, {"targets": 2}, (0.5, 0.5)),
        (8, {"targets": 4}, (1.0, 1.0)),
        (4, {"target_gpus": 2.0}, (2.0, 1.0)),
        (4, {"draft_gpus": 0.0}, (1.0, 0.0)),
        (0, {"tensor_parallel": 2}, (0.0, 0.0)),
        (3, {"tensor_parallel": 2}, (1.0, 1.0)),
        (3, {"tensor_parallel": 2, "drafts": 2}, (1.0, 0.5)),
        (4, {"tensor_parallel": 2, "target_gpus": 0.0}, (0.0, 1.0)),
    ],
)
def test_gpus_are_shared_where_nothing_else_is_said(gpus, fields, shares):
    settings = Settings(**fields).resolved().with_gpus(gpus)
    assert (settings.target_gpus, settings.draft_gpus) == shares
