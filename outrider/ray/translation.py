"""Translates an ``LLMConfig`` to settings of Outrider."""

from collections.abc import Mapping
from typing import Any

from cluster.arguments import Fields
from cluster.groups import DEFAULT_DRAFT
from outrider.drafters.registry import Place, drafter
from outrider.ray.llm_config import BuilderArguments, LLMConfig
from outrider.ray.speculative_config import AT_LOAD, SpeculativeConfig

DTYPES = {"half": "float16", "float": "float32"}
CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
SAMPLING_DEFAULTS = {"auto": "checkpoint", "vllm": "neutral"}
ACCELERATORS = {"A10": "A10G"}
DEVICES = ("CPU", "GPU")  # Ray's own resources in a bundle


def translated(builder: BuilderArguments, config: LLMConfig) -> Fields:
    """Returns settings by group, without settings that are left open."""
    engine, deployment, adapters = config.engine_kwargs, config.deployment_config, config.lora_config
    scaling, bundle = deployment.autoscaling_config, config.placement_group_config.bundle
    on_cpu = config.accelerator_config is not None and config.accelerator_config.kind == "cpu"
    source = config.model_loading_config.model_source or config.model_loading_config.model_id
    resources = {name: count for name, count in bundle.items() if name not in DEVICES}
    target = {
        "name": config.model_loading_config.model_id,
        "model": source,
        "tensor_parallel": engine.tensor_parallel_size,
        "dtype": _named(DTYPES, engine.dtype),
        "quantization": engine.quantization if engine.quantization in AT_LOAD else None,
        "cache_dtype": _named(CACHE_DTYPES, engine.kv_cache_dtype),
        "cache_memory": engine.kv_cache_memory_bytes,
        "max_sequences": engine.max_num_seqs,
        "prefill_chunk": engine.max_num_batched_tokens,
        "max_adapter_rank": engine.max_lora_rank,
        "adapter_folder": adapters.dynamic_lora_loading_path,
        "max_loaded_adapters": adapters.max_num_adapters_per_replica,
        "accelerator": _named(ACCELERATORS, config.accelerator_type),
        "gpus": 0.0 if on_cpu else bundle.get("GPU"),
        "resources": {**resources, **(deployment.ray_actor_options.resources or {})} or None,
        "placement": config.placement_group_config.strategy,
        "replicas": scaling.min_replicas if scaling else deployment.num_replicas,
        "max_replicas": scaling.max_replicas if scaling else None,
        "sequences_per_replica": scaling.target_ongoing_requests if scaling else None,
    }
    gateway = {
        "replicas": builder.ingress_deployment_config.num_replicas
        or config.experimental_configs.num_ingress_replicas,
        "max_requests": deployment.max_ongoing_requests,
        "max_waiting": deployment.max_queued_requests,
        "max_prompt_tokens": engine.max_model_len,
        "max_output_tokens": engine.max_model_len,
        "sampling_defaults": _named(SAMPLING_DEFAULTS, engine.generation_config),
    }
    delays = {
        "up_delay_s": scaling.upscale_delay_s if scaling else None,
        "down_delay_s": scaling.downscale_delay_s if scaling else None,
    }
    groups: Fields = {"target": target, "gateway": gateway, "autoscaling": delays}
    if engine.speculative_config is not None:
        for group, more in _speculation(engine.speculative_config, source, on_cpu=on_cpu).items():
            groups[group] = {**groups.get(group, {}), **more}
    return {name: _given(group) for name, group in groups.items() if _given(group)}


def _speculation(asked: SpeculativeConfig, target: str, *, on_cpu: bool) -> Fields:
    """Returns the settings of a drafter.

    target: the target's model; with multi-token prediction, the drafter's checkpoint may be this model.
    """
    settings: Fields = {"pace": {"max_depth": asked.num_speculative_tokens}}
    row = drafter(asked.row)
    match row.place:
        case Place.GATEWAY:
            keeps_none = row.remembers and asked.suffix_decoding_max_cached_requests == 0
            settings["gateway"] = {"drafters": [row.name], "past_answer_tokens": 0 if keeps_none else None}
        case Place.TARGET_WORKER:
            checkpoint = {} if asked.model in (None, target) else {"checkpoint": asked.model}
            settings["target"] = {"drafters": {row.name: checkpoint}}
        case Place.DRAFT_WORKER:
            draft = {
                "model": asked.model,
                "quantization": asked.quantization if asked.quantization in AT_LOAD else None,
                "worker_drafter": row.name if asked.parallel_drafting else None,
                "gpus": 0.0 if on_cpu else None,
            }
            settings["drafts"] = {DEFAULT_DRAFT: _given(draft)}
    return settings


def _named(names: Mapping[str, str], given: str | None) -> str | None:
    return None if given is None else names.get(given, given)


def _given(values: Mapping[str, Any]) -> Fields:
    return {name: value for name, value in values.items() if value is not None}
