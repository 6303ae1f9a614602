"""Fields of a request that are not served: some change nothing, some would change the answer.

Fields of OpenAI's API that cannot change the answer are Ignored. Fields that would change it are refused by
name, unless their value is neutral. A setting decides whether unknown fields are refused.
"""

from collections.abc import Collection
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from gateway.api.openai.field_types import NOT_READ
from gateway.errors import InvalidRequestError

UnknownFields = Literal["refuse", "ignore"]

MANY_UNKNOWN = 100  # fields of one request; removing more would take long
IGNORED_HEADER = "outrider-ignored"  # names of ignored fields
SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text

# Fields by their neutral values: fields of OpenAI, vLLM, SGLang, llama.cpp and TGI, and of services whose
# clients may be pointed at Outrider. Some fields are served at one endpoint and not at another.
_BY_NEUTRAL_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (),
        """
        adapter_id adaptive_decay audio chat_template conversation custom_logit_processor
        dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent ebnf
        enable_thinking guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
        guided_whitespace_pattern guideline input input_embeds input_ids inputs json_schema
        kv_transfer_params lora_path max_new_tokens max_output_tokens max_tool_calls mirostat_eta
        mirostat_tau n_discard num_ctx penalize_nl prediction prefix previous_response_id prompt prompt_embeds
        prompt_logprobs prompt_mode provider random_seed reasoning_effort reasoning_format regex
        repetition_detection samplers sampling_seed session_params structural_tag think thinking
        thinking_budget thinking_token_budget tool_prompt top_n_tokens truncate truncate_prompt_tokens
        web_search_options xtc_threshold
        """,
    ),
    (
        ([],),
        """
        bad_words context_management documents functions grammar_triggers image_data images include
        input_extra logit_processors logits_processors lora messages plugins preserved_tokens
        response_fields stop_regex stop_sequences tools transforms
        """,
    ),
    (
        (False,),
        """
        background continue_final_message decoder_input_details details early_stopping echo grammar_lazy
        include_stop_str_in_output no_stop_trim raw return_full_text return_hidden_states
        return_token_ids return_tokens_as_token_ids safe_prompt thinking_forced_open use_beam_search
        watermark
        """,
    ),
    (
        (True,),
        """
        add_bos_token add_generation_prompt add_special_tokens do_sample include_reasoning
        parallel_tool_calls parse_tool_calls separate_reasoning skip_special_tokens
        spaces_between_special_tokens stream_reasoning
        """,
    ),
    (
        (0,),
        """
        dry_multiplier dynatemp_range min_keep min_new_tokens mirostat n_indent n_keep n_probs top_a
        top_logprobs xtc_probability
        """,
    ),
    (
        ("",),
        """
        cache_salt format grammar input_prefix input_suffix instructions suffix system system_prompt
        template
        """,
    ),
    (
        ({},),
        """
        chat_template_kwargs custom_params media_io_kwargs mm_processor_kwargs options parameters
        reasoning sampling_params vllm_xargs
        """,
    ),
    ((-1,), "adaptive_target n_predict num_predict reasoning_budget repeat_last_n top_n_sigma"),
    ((1,), "best_of repeat_penalty tfs_z typical typical_p"),
    (("none", "auto"), "function_call tool_choice"),
    ((["text"],), "modalities"),
    (({"format": {"type": "text"}}, {}), "text"),
    (("disabled",), "truncation"),
    ((1.0,), "length_penalty"),
    ((0, -1), "t_max_predict_ms"),
)
UNSERVED = {name: values for values, names in _BY_NEUTRAL_VALUES for name in names.split()}


def served(fields: Any, known: Collection[str]) -> Any:
    """Returns the fields without unserved fields, whose values must be neutral.

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
    """Returns the fields without unknown fields, and their names; unchanged if there are too many."""
    if error.error_count() > MANY_UNKNOWN:
        return fields, []
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [each["loc"] for each in wrong if each["type"] == "extra_forbidden"]
    for place in unknown:
        fields = _without(fields, place)
    return fields, [".".join(map(str, place)) for place in unknown]


def _without(part: Any, place: tuple[int | str, ...]) -> Any:
    """Returns the part without the value at a path, whose steps may include names of union members."""
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
