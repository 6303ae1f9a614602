"""What each field of an ``LLMConfig`` becomes: a setting of Outrider, a line of the log, or a refusal."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from cluster.arguments import validated
from cluster.settings_errors import SettingsError
from outrider.demo.prompts import DEMO
from outrider.ray.llm_config import BuilderArguments, LLMConfig
from outrider.ray.mirror import NO_MEANING, Mirror
from outrider.ray.reading import read_arguments, unheeded
from outrider.ray.translation import translated

MODEL = {"model_id": "m", "model_source": "owner/target"}
DRAFT = {"method": "draft_model", "model": "owner/draft"}


def config(**fields: Any) -> dict[str, Any]:
    return {"model_loading_config": MODEL, **fields}


def settings(given: dict[str, Any], **builder: Any) -> dict[str, Any]:
    """Returns the settings of a config, which Outrider accepts."""
    found = translated(*read_arguments({"llm_configs": [given], **builder}))
    validated(found)
    return found


def speculating(**fields: Any) -> dict[str, Any]:
    return settings(config(engine_kwargs={"speculative_config": fields}))


def at(path: str, value: Any) -> dict[str, Any]:
    """Returns a config in which the field of this path has a value."""
    *groups, name = path.split(".")
    given: dict[str, Any] = {name: value}
    if groups[-1:] == ["speculative_config"]:
        given = {**DRAFT, **given}
    for group in reversed(groups):
        given = {group: given}
    if groups[:1] == ["model_loading_config"]:
        given = {"model_loading_config": {**MODEL, **given["model_loading_config"]}}
    return config(**given)


# a value of each field that changes settings, and the settings that it gives
TRANSLATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "model_loading_config.model_id": ("other", {"target": {"name": "other"}}),
    "model_loading_config.model_source": ("/folder", {"target": {"model": "/folder"}}),
    "engine_kwargs.tensor_parallel_size": (4, {"target": {"tensor_parallel": 4}}),
    "engine_kwargs.dtype": ("half", {"target": {"dtype": "float16"}}),
    "engine_kwargs.quantization": ("int8", {"target": {"quantization": "int8"}}),
    "engine_kwargs.kv_cache_dtype": ("fp8", {"target": {"cache_dtype": "float8_e4m3fn"}}),
    "engine_kwargs.kv_cache_memory_bytes": (2**30, {"target": {"cache_memory": 2**30}}),
    "engine_kwargs.max_model_len": (
        8192,
        {"gateway": {"max_prompt_tokens": 8192, "max_output_tokens": 8192}},
    ),
    "engine_kwargs.max_num_seqs": (64, {"target": {"max_sequences": 64}}),
    "engine_kwargs.max_num_batched_tokens": (4096, {"target": {"prefill_chunk": 4096}}),
    "engine_kwargs.max_lora_rank": (32, {"target": {"max_adapter_rank": 32}}),
    "engine_kwargs.generation_config": ("vllm", {"gateway": {"sampling_defaults": "neutral"}}),
    "engine_kwargs.speculative_config.method": ("ngram", {"gateway": {"drafters": ["ngram"]}}),
    "engine_kwargs.speculative_config.model": ("d", {"drafts": {"model": {"model": "d"}}}),
    "engine_kwargs.speculative_config.num_speculative_tokens": (3, {"pace": {"max_depth": 3}}),
    "engine_kwargs.speculative_config.parallel_drafting": (
        True,
        {"drafts": {"model": {"model": "owner/draft", "worker_drafter": "parallel"}}},
    ),
    "engine_kwargs.speculative_config.quantization": (
        "int4",
        {"drafts": {"model": {"model": "owner/draft", "quantization": "int4"}}},
    ),
    "deployment_config.num_replicas": (3, {"target": {"replicas": 3}}),
    "deployment_config.autoscaling_config.min_replicas": (1, {"target": {"replicas": 1}}),
    "deployment_config.autoscaling_config.max_replicas": (3, {"target": {"max_replicas": 3}}),
    "deployment_config.autoscaling_config.target_ongoing_requests": (
        8,
        {"target": {"sequences_per_replica": 8}},
    ),
    "deployment_config.autoscaling_config.upscale_delay_s": (1, {"autoscaling": {"up_delay_s": 1.0}}),
    "deployment_config.autoscaling_config.downscale_delay_s": (2, {"autoscaling": {"down_delay_s": 2.0}}),
    "deployment_config.max_ongoing_requests": (64, {"gateway": {"max_requests": 64}}),
    "deployment_config.max_queued_requests": (0, {"gateway": {"max_waiting": 0}}),
    "deployment_config.ray_actor_options.resources": ({"big": 1}, {"target": {"resources": {"big": 1.0}}}),
    "accelerator_type": ("A10", {"target": {"accelerator": "A10G"}}),
    "accelerator_config.kind": ("cpu", {"target": {"gpus": 0.0}}),
    "placement_group_config.bundle_per_worker": (
        {"CPU": 1, "GPU": 1, "big": 1},
        {"target": {"gpus": 1.0, "resources": {"big": 1.0}}},
    ),
    "placement_group_config.bundles": ([{"GPU": 1}], {"target": {"gpus": 1.0}}),
    "placement_group_config.strategy": ("SPREAD", {"target": {"placement": "SPREAD"}}),
    "lora_config.dynamic_lora_loading_path": ("/adapters", {"target": {"adapter_folder": "/adapters"}}),
    "lora_config.max_num_adapters_per_replica": (2, {"target": {"max_loaded_adapters": 2}}),
    "experimental_configs.num_ingress_replicas": (5, {"gateway": {"replicas": 5}}),
}
# fields that change settings with another method than a draft model alone: tests of their own
OF_A_METHOD = {"engine_kwargs.speculative_config.suffix_decoding_max_cached_requests"}


def fields(model: type[Mirror], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all fields that hold no model, by path."""
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_mirror(kind)]
        if inner:
            yield from fields(inner[0], f"{path}{name}.")
        else:
            yield f"{path}{name}", field


def is_mirror(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mirror)


def values(annotation: Any) -> set[Any]:
    """Returns the values that a field of fixed values takes, without None; empty for any other field."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
    return {value for kind in kinds for value in get_args(kind)} - {None}


@pytest.mark.parametrize("path", TRANSLATED)
def test_field_with_a_meaning_becomes_its_setting(path: str) -> None:
    value, expected = TRANSLATED[path]
    found = settings(at(path, value))
    for group, given in expected.items():
        assert {name: found[group][name] for name in given} == given


def test_llm_config_field_is_translated_or_told_or_takes_one_value() -> None:
    """A field without any of it would be dropped without a word."""
    by_path = dict(fields(LLMConfig))
    translates = {*TRANSLATED, *OF_A_METHOD}
    told = {path for path, field in by_path.items() if NO_MEANING in (field.json_schema_extra or {})}
    of_none = {path for path, field in by_path.items() if field.annotation == Literal[None]}
    only_said = {  # values that name what Outrider does anyway
        "engine_kwargs.load_format",
        "engine_kwargs.runner",
        "engine_kwargs.task",
    }
    of_one = {path for path, field in by_path.items() if len(values(field.annotation)) == 1}
    assert by_path.keys() == translates | told | of_none | of_one | only_said
    assert not translates & told
    assert [path for path, field in by_path.items() if not field.description] == []


@pytest.mark.parametrize("path", [path for path, field in fields(LLMConfig) if field.json_schema_extra])
def test_field_without_a_meaning_is_told_once_and_changes_nothing(path: str) -> None:
    without = at(path, None)
    builder, found = read_arguments({"llm_configs": [at(path, "x")]})
    (line,) = unheeded(found)
    assert line.startswith(f"{path}='x' has no meaning here: ")
    assert translated(builder, found) == settings(without)


def test_ingress_deployment_gives_the_number_of_gateways_and_wins() -> None:
    given = config(experimental_configs={"num_ingress_replicas": 5})
    found = settings(given, ingress_deployment_config={"num_replicas": 2})
    assert found["gateway"]["replicas"] == 2


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (DRAFT, {"drafts": {"model": {"model": "owner/draft"}}}),
        ({"model": "owner/draft"}, {"drafts": {"model": {"model": "owner/draft"}}}),
        ({"method": "ngram", "prompt_lookup_max": 4}, {"gateway": {"drafters": ["ngram"]}}),
        ({"method": "suffix"}, {"gateway": {"drafters": ["suffix"]}}),
        (
            {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
            {"gateway": {"drafters": ["suffix"], "past_answer_tokens": 0}},
        ),
        ({"model": "o/Qwen3-8B_EAGLE3"}, {"drafters": {"eagle3": {"checkpoint": "o/Qwen3-8B_EAGLE3"}}}),
        ({"model": "o/EAGLE-3-Llama"}, {"drafters": {"eagle3": {"checkpoint": "o/EAGLE-3-Llama"}}}),
        (
            {"method": "eagle3", "model": "h", "parallel_drafting": True},
            {"drafters": {"peagle": {"checkpoint": "h"}}},
        ),
        ({"method": "medusa", "model": "h"}, {"drafters": {"medusa": {"checkpoint": "h"}}}),
        ({"method": "dflash", "model": "h"}, {"drafters": {"dflash": {"checkpoint": "h"}}}),
        ({"method": "mtp"}, {"drafters": {"mtp": {}}}),
        ({"method": "qwen3_next_mtp", "model": "owner/target"}, {"drafters": {"mtp": {}}}),
    ],
    ids=str,
)
def test_speculative_method_becomes_a_drafter(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    found = speculating(**asked)
    places = {"drafters": found["target"].get("drafters"), **found}
    assert {name: places[name] for name in expected} == expected


def test_speculative_config_may_be_json() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4}'
    found = settings(config(engine_kwargs={"speculative_config": text}))
    assert (found["gateway"], found["pace"]) == ({"drafters": ["ngram"]}, {"max_depth": 4})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (at("engine_kwargs.tensor_paralel_size", 2), "tensor_paralel_size=2 is no field here: tensor_parall"),
        (at("engine_kwargs.nothing_like_it", 1), "is no field here: see docs/ray-llm.md"),
        (at("engine_kwargs.pipeline_parallel_size", 2), "should be 1: a target is shared by tensor_parallel"),
        (at("engine_kwargs.quantization", "fp8"), "fp8, bitsandbytes: name a checkpoint that is stored"),
        (at("engine_kwargs.tokenizer", "t"), "should be None: the tokenizer is the checkpoint's own"),
        (at("engine_kwargs.speculative_config.method", "eagle"), "'eagle' is no method here: give draft_mo"),
        (at("engine_kwargs.speculative_config.draft_tensor_parallel_size", 2), "runs on one device"),
        (at("engine_kwargs.speculative_config.rejection_sample_method", "synthetic"), "coupled verification"),
        (at("engine_kwargs.speculative_config.num_speculative_tokens", 17), "less than or equal to 16: pace"),
        (config(engine_kwargs={"speculative_config": {}}), "give method, or a model to draft with"),
        (config(engine_kwargs={"speculative_config": {"method": "eagle3"}}), "give model"),
        (
            config(engine_kwargs={"speculative_config": {"method": "ngram", "parallel_drafting": True}}),
            "leave it out",
        ),
        (
            at("model_loading_config.model_source", "s3://bucket/m"),
            "'s3://bucket/m' is in a cloud: give a fo",
        ),
        (at("deployment_config.num_replicas", "auto"), "for `auto` give autoscaling_config"),
        (at("deployment_config.autoscaling_config.min_replicas", 0), "min_replicas=0 should be greater than"),
        (at("runtime_env", {"pip": []}), "give runtime_env to the application of the config file"),
        (at("placement_group_config.bundles", [{"GPU": 1}, {"GPU": 2}]), "bundles differ"),
        (at("placement_group_config.bundles", [{"GPU": 1}] * 2), "bundles holds 2, and engine_kwargs.tensor"),
        ({}, "model_loading_config is missing"),
    ],
)
def test_refusal_names_field_value_and_what_would_be_accepted(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_arguments({"llm_configs": [given]})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"llm_configs": [config(), config()]}, "llm_configs: 2 models: there is one target a service"),
        ({"llm_configs": "no-file.yaml"}, "llm_configs='no-file.yaml' cannot be read"),
        ({"llm_configs": "[{"}, "is no JSON"),
        ({}, "llm_configs is missing"),
        ({"llm_configs": [config()], "ingress_cls_config": {"ingress_cls": "x"}}, "is the ingress: leave it"),
    ],
)
def test_arguments_that_are_no_single_config_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_arguments(arguments)
    assert told in str(refused.value)


def test_config_may_be_the_path_of_a_file(tmp_path: Any) -> None:
    file = tmp_path / "llm.yaml"
    file.write_text("model_loading_config: {model_id: m}\nengine_kwargs: {dtype: bfloat16}\n")
    found = translated(*read_arguments({"llm_configs": str(file)}))
    assert found == {"target": {"name": "m", "model": "m", "dtype": "bfloat16"}}


def test_demo_pair_is_accepted_by_its_folders() -> None:
    pair = {"model_id": "demo", "model_source": str(DEMO / "target")}
    drafting = {"speculative_config": {"model": str(DEMO / "draft"), "num_speculative_tokens": 4}}
    found = validated(
        translated(
            *read_arguments({"llm_configs": [{"model_loading_config": pair, "engine_kwargs": drafting}]})
        )
    )
    assert (found.target.name, found.drafts["model"].model) == ("demo", str(DEMO / "draft"))


def test_builder_argument_of_any_name_has_a_meaning() -> None:
    assert [path for path, field in fields(BuilderArguments) if not field.description] == []
