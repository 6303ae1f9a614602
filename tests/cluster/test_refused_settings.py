"""Settings that are refused, with the name, the value and what is accepted."""

from pathlib import Path

import pytest

from cluster.arguments import read_settings
from cluster.settings_errors import SettingsError
from tests.support.settings_files import in_a_file, settings


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
        (
            "target.prefill_chunk",
            "0",
            "target.prefill_chunk='0' should be greater than or equal to 1: prompt tokens in one step",
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


@pytest.mark.parametrize("second", ["addresses.direct_grpc_port", "ray.metrics_port"])
def test_port_that_two_listeners_are_given_is_refused_with_both_names(second: str) -> None:
    with pytest.raises(SettingsError, match=f"{second}=8000 is addresses.http_port already: give another"):
        read_settings({second: "8000"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("target.tensor_paralel", "target.tensor_paralel='1' is no setting: target.tensor_parallel is one"),
        ("drafts.small.quantisation", "drafts.small.quantization is one"),
        ("drafs.default.model", "is no setting: drafts or draft is one"),
        ("tensor_parallel", "tensor_parallel='1' is no setting: target.tensor_parallel is one"),
        (
            "quantization",
            "target.quantization or drafts.model.quantization is one",
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
            {"target": "t", "target.drafters.eagle3.layers": "12"},
            r"drafters\.eagle3\.layers=12: only drafters\.early_exit has layers",
        ),
        (
            {"target": "t", "target.drafters.early_exit.layers": "12"}
            | {"target.drafters.early_exit.skipped_layers": "[1]"},
            r"skipped_layers=\[1\] with layers=12: give one of them",
        ),
        (
            {"target": "t", "target.adapter_folder": "f", "target.batch_invariant": "true"},
            r"adapter_folder with batch_invariant=True: .* leave one of them out",
        ),
        (
            {"target": "t", "target.adapter_folder": "f", "target.drafters.early_exit": "{}"},
            r"adapter_folder with drafters\.early_exit: .* take another drafter",
        ),
        (
            {"target": "t", "target.drafters.ngram": "{}"},
            r"'ngram' is not loaded by target workers; give colo",
        ),
        (
            {"target": "t", "target.drafters.eagle3": "{}", "gateway.drafters": '["medusa"]'},
            r"gateway\.drafters=\('medusa',\): 'medusa' would run in the target's process, .* 'eagle3'",
        ),
        (
            {"target": "t", "gateway.drafters": '["medusa"]'},
            r"gateway\.drafters=\('medusa',\): 'medusa' would run in the target's process, .* none",
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


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("target:\n  model: t\n  threads: many\n", 3, "target.threads='many' should be a valid integer"),
        ("target.model: t\n\ntarget.thread: 2\n", 3, "target.thread=2 is no setting"),
        ("pace: {}\ntarget: {model: t}\ndraft: 5\n", 3, "draft=5 is no setting"),
        ("target: t\ndrafts:\n  small:\n    gpus: 1\n", 3, "drafts.small.model is missing"),
        ("target: {model: t, resources: {\n  big: x}}\n", 2, "target.resources.big='x' should be"),
    ],
)
def test_wrong_setting_of_a_file_is_told_with_its_line(
    tmp_path: Path, text: str, line: int, told: str
) -> None:
    file = in_a_file(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        settings(config=file)
    assert str(refused.value).startswith(f"{file}:{line}: {told}")


def test_wrong_argument_over_a_right_line_of_a_file_names_no_line(tmp_path: Path) -> None:
    file = in_a_file(tmp_path, "target: {model: t, threads: 2}\n")
    with pytest.raises(SettingsError, match=r"^target\.threads='many'"):
        settings(config=file, **{"target.threads": "many"})


@pytest.mark.parametrize("second", ["target: {threads: 2}", "target.threads: 2"])
def test_setting_twice_in_a_file_is_told_with_both_lines(tmp_path: Path, second: str) -> None:
    file = in_a_file(tmp_path, f"target:\n  threads: 1\n{second}\n")
    with pytest.raises(SettingsError, match=r":3: target(\.threads)? is given twice, before at .*:[12]$"):
        settings(config=file)


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
