"""vLLM's arguments, as ``LLMConfig.engine_kwargs`` takes them."""

import json
from typing import Any, Literal

from pydantic import Field, field_validator

from outrider.ray.mirror import Mirror, without_meaning
from outrider.ray.speculative_config import BY_DOWNLOAD, CheckpointQuantization, SpeculativeConfig

NO_OVERRIDES = "what the checkpoint says holds: change it there"
TEXT_ALONE = "text alone is served"
ALWAYS = "it is always on"
BY_TEMPLATE = "the chat template of the checkpoint tells the form of calls and thoughts"
BY_FOLDER = "target.adapters, or lora_config, says which adapters there are"


class EngineKwargs(Mirror):
    """Arguments of the engine, as vLLM names them."""

    tensor_parallel_size: int | None = Field(default=None, ge=1, description="target.tensor_parallel")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = Field(
        default=None, description="target.dtype; half is float16, float is float32"
    )
    quantization: CheckpointQuantization | None = Field(
        default=None,
        description="target.quantization if it is int8 or int4; others only say what the checkpoint holds."
        " fp8, bitsandbytes: name a checkpoint that is stored quantized, and leave this out",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] | None = Field(
        default=None, description="target.cache_dtype; fp8 is float8_e4m3fn"
    )
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1, description="target.cache_memory")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="gateway.max_prompt_tokens and gateway.max_output_tokens: each at most this. vLLM bounds"
        " their sum, which here the context of the checkpoint bounds",
    )
    max_num_seqs: int | None = Field(default=None, ge=1, description="target.max_sequences")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="target.prefill_chunk: prompt tokens alone, not all tokens of a step"
    )
    max_lora_rank: int | None = Field(default=None, ge=1, description="target.max_adapter_rank")
    generation_config: Literal["auto", "vllm"] | None = Field(
        default=None, description="gateway.sampling_defaults: auto is checkpoint, vllm is neutral"
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None,
        description="None: Outrider's own default, which is ngram. A request without Drafts has"
        " speculation.mode=off",
    )

    pipeline_parallel_size: Literal[1] | None = Field(
        default=None, description="a target is shared by tensor_parallel_size alone"
    )
    data_parallel_size: Literal[1] | None = Field(
        default=None, description="deployment_config.num_replicas gives more replicas"
    )
    decode_context_parallel_size: Literal[1] | None = Field(
        default=None, description="a target is shared by tensor_parallel_size alone"
    )
    enable_expert_parallel: Literal[False] | None = Field(
        default=None, description="experts are shared as all weights are, by tensor_parallel_size"
    )
    cpu_offload_gb: Literal[0] | None = Field(
        default=None, description="weights stay on the device: give int8 or int4, or more devices"
    )
    kv_transfer_config: Literal[None] = Field(
        default=None, description="prompts and answers are computed at one place: leave it out"
    )
    load_format: Literal["auto", "safetensors"] | None = Field(
        default=None, description="checkpoints are read as safetensors, or as transformers loads them"
    )
    model: Literal[None] = Field(default=None, description="model_loading_config names it: leave it out")
    tokenizer: Literal[None] = Field(default=None, description="the tokenizer is the checkpoint's own")
    revision: Literal[None] = Field(
        default=None,
        description=BY_DOWNLOAD,
    )
    hf_overrides: Literal[None] = Field(default=None, description=NO_OVERRIDES)
    rope_scaling: Literal[None] = Field(default=None, description=NO_OVERRIDES)
    chat_template: Literal[None] = Field(default=None, description=NO_OVERRIDES)
    override_generation_config: Literal[None] = Field(default=None, description=NO_OVERRIDES)
    runner: Literal["auto", "generate"] | None = Field(default=None, description="texts are generated")
    task: Literal["auto", "generate"] | None = Field(default=None, description="texts are generated")
    enable_sleep_mode: Literal[False] | None = Field(default=None, description="a worker never sleeps")

    gpu_memory_utilization: Any = without_meaning(
        "the memory plan gives the cache what weights and steps leave; target.cache_memory says it otherwise"
    )
    block_size: Any = without_meaning("a block of the cache holds 16 tokens")
    num_gpu_blocks_override: Any = without_meaning("kv_cache_memory_bytes bounds the cache")
    swap_space: Any = without_meaning("a sequence without cache is computed again")
    seed: Any = without_meaning("each request has its own seed, and is told it")
    enable_prefix_caching: Any = without_meaning(ALWAYS)
    enable_chunked_prefill: Any = without_meaning(ALWAYS)
    async_scheduling: Any = without_meaning(ALWAYS)
    enable_prompt_tokens_details: Any = without_meaning(ALWAYS)
    enforce_eager: Any = without_meaning("passes are captured as graphs if that is possible")
    max_seq_len_to_capture: Any = without_meaning("passes are captured as graphs if that is possible")
    compilation_config: Any = without_meaning("passes are captured as graphs if that is possible")
    attention_backend: Any = without_meaning("there is one attention for each kind of device")
    disable_custom_all_reduce: Any = without_meaning("ranks meet by NCCL or gloo")
    distributed_executor_backend: Any = without_meaning("ranks are actors of Ray")
    scheduling_policy: Any = without_meaning("a request names its priority, interactive or batch")
    trust_remote_code: Any = without_meaning("no code of a checkpoint is run")
    tokenizer_mode: Any = without_meaning("tokenizer.json is read")
    download_dir: Any = without_meaning("HF_HOME in the environment of the workers names the folder")
    served_model_name: Any = without_meaning("model_loading_config.model_id is the name")
    enable_lora: Any = without_meaning(BY_FOLDER)
    max_loras: Any = without_meaning("adapters of a step are not counted")
    max_cpu_loras: Any = without_meaning(
        "lora_config.max_num_adapters_per_replica bounds those that are loaded"
    )
    limit_mm_per_prompt: Any = without_meaning(TEXT_ALONE)
    language_model_only: Any = without_meaning(TEXT_ALONE)
    enable_auto_tool_choice: Any = without_meaning(ALWAYS)
    tool_call_parser: Any = without_meaning(BY_TEMPLATE)
    reasoning_parser: Any = without_meaning(BY_TEMPLATE)
    guided_decoding_backend: Any = without_meaning("llguidance holds answers to their form")
    structured_outputs_config: Any = without_meaning("llguidance holds answers to their form")
    max_logprobs: Any = without_meaning("requests have bounds of their own")
    disable_log_stats: Any = without_meaning("metrics are always recorded")
    disable_log_requests: Any = without_meaning("requests are never logged")
    enable_log_requests: Any = without_meaning("requests are never logged")

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """Reads JSON, as on vLLM's command line. Raises ValueError for other text."""
        return json.loads(given) if isinstance(given, str) else given
