"""Fields of a request that are not served: some change nothing, some would change the answer.

Fields of OpenAI's API that cannot change the answer are Ignored. Fields that would change it are refused by
name, unless their value asks for nothing. A setting decides whether unknown fields are refused.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from gateway.errors import InvalidRequestError

UnknownFields = Literal["refuse", "ignore"]

NOT_READ = "accepted, changes nothing"
Ignored = Annotated[Any, Field(description=NOT_READ)]
MANY_UNKNOWN = 100  # fields of one request; removing more would take long
IGNORED_HEADER = "outrider-ignored"  # names of ignored fields
SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text

# Values that ask for nothing, by field. A field may be served at one endpoint and unserved at another.
UNSERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "previous_response_id": (),
    "suffix": ("",),
    "web_search_options": (),
    # OpenAI's, served at some endpoints
    "background": (False,),
    "echo": (False,),
    "include": ([],),
    "input": (),
    "instructions": ("",),
    "max_output_tokens": (),
    "messages": ([],),
    "parallel_tool_calls": (True,),
    "prompt": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "cache_salt": ("",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # SGLang's
    "custom_logit_processor": (),
    "custom_params": ({},),
    "ebnf": (),
    "image_data": ([],),
    "input_embeds": (),
    "input_ids": (),
    "json_schema": (),
    "lora_path": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "sampling_params": ({},),
    "sampling_seed": (),
    "separate_reasoning": (True,),
    "session_params": (),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    # llama.cpp's
    "add_bos_token": (True,),
    "adaptive_decay": (),
    "adaptive_target": (-1,),
    "dry_allowed_length": (),
    "dry_base": (),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (),
    "dry_sequence_breakers": (),
    "dynatemp_exponent": (),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "input_extra": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "n_discard": (),
    "n_indent": (0,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "penalize_nl": (),
    "preserved_tokens": ([],),
    "reasoning_budget": (-1,),
    "reasoning_format": (),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "response_fields": ([],),
    "samplers": (),
    "system_prompt": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": (),
    # TGI's
    "adapter_id": (),
    "decoder_input_details": (False,),
    "details": (False,),
    "do_sample": (True,),
    "guideline": (),
    "inputs": (),
    "parameters": ({},),
    "return_full_text": (False,),
    "stop_sequences": ([],),
    "tool_prompt": (),
    "top_n_tokens": (),
    "truncate": (),
    "typical": (1,),
    "watermark": (False,),
    # Fields of services whose clients may be pointed at Outrider
    "enable_thinking": (),
    "format": ("",),
    "images": ([],),
    "num_ctx": (),
    "num_predict": (-1,),
    "options": ({},),
    "plugins": ([],),
    "prefix": (),
    "prompt_mode": (),
    "provider": (),
    "random_seed": (),
    "raw": (False,),
    "safe_prompt": (False,),
    "system": ("",),
    "template": ("",),
    "think": (),
    "thinking": (),
    "thinking_budget": (),
    "top_a": (0,),
    "transforms": ([],),
}


def served(fields: Any, known: Collection[str]) -> Any:
    """Returns the fields without unserved fields, whose values must ask for nothing.

    Args:
        known: names of the fields that the endpoint serves.

    Raises:
        InvalidRequestError: a field would change the answer.
    """
    if not isinstance(fields, dict):
        return fields
    unserved = fields.keys() & UNSERVED.keys() - known
    for name in sorted(unserved):
        if fields[name] is not None and fields[name] not in UNSERVED[name]:
            raise InvalidRequestError(name, "would change the answer, and is not served")
    return {name: value for name, value in fields.items() if name not in unserved}


def without_unknown(fields: Any, error: ValidationError) -> tuple[Any, list[str]]:
    """Returns the fields without unknown fields, and the names of these; unchanged if they are too many."""
    if error.error_count() > MANY_UNKNOWN:
        return fields, []
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [each["loc"] for each in wrong if each["type"] == "extra_forbidden"]
    for place in unknown:
        fields = _without(fields, place)
    return fields, [".".join(map(str, place)) for place in unknown]


def _without(part: Any, place: tuple[int | str, ...]) -> Any:
    """Returns the part without what lies at the place, whose steps may include names of union members."""
    step, rest = place[0], place[1:]
    if isinstance(part, dict) and step in part:
        if not rest:
            return {name: value for name, value in part.items() if name != step}
        return {**part, step: _without(part[step], rest)}
    if isinstance(part, list) and isinstance(step, int):
        return [_without(item, rest) if index == step else item for index, item in enumerate(part)]
    return _without(part, rest) if rest else part


def ignored(body: BaseModel) -> list[str]:
    """Returns the names of fields that the request sets and that change nothing."""
    fields = type(body).model_fields
    return sorted(name for name in body.model_fields_set if fields[name].description == NOT_READ)
