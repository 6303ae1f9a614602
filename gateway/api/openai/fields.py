"""Fields of a request that are not served: some change nothing, some would change the answer.

What OpenAI publishes and what cannot change the answer is Ignored. What would change it is refused by name,
unless its value asks for what is done anyway. Whether a field that nobody knows is refused is a setting.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from gateway.errors import InvalidRequestError

UnknownFields = Literal["refuse", "ignore"]

NOT_READ = "accepted, changes nothing"
Ignored = Annotated[Any, Field(description=NOT_READ)]
MANY_UNKNOWN = 100  # fields of one request: to tell them apart would take long
IGNORED_HEADER = "outrider-ignored"  # names what was passed over
SEED_HEADER = "outrider-seed"  # repeating the request with this seed gives the same text

# By name the values that ask for nothing.
UNSERVED: dict[str, tuple[Any, ...]] = {
    # of OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "web_search_options": (),
    # of others
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def served(fields: Any) -> Any:
    """Without what asks for nothing. Raises InvalidRequestError for what would change the answer."""
    if not isinstance(fields, dict) or not fields.keys() & UNSERVED.keys():
        return fields
    for name in fields.keys() & UNSERVED.keys():
        if fields[name] is not None and fields[name] not in UNSERVED[name]:
            raise InvalidRequestError(name, "would change the answer, and is not served")
    return {name: value for name, value in fields.items() if name not in UNSERVED}


def without_unknown(fields: Any, error: ValidationError) -> tuple[Any, list[str]]:
    """The fields without those that nobody knows, and their names; as they are where there are too many."""
    if error.error_count() > MANY_UNKNOWN:
        return fields, []
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [one["loc"] for one in wrong if one["type"] == "extra_forbidden"]
    for place in unknown:
        fields = _without(fields, place)
    return fields, [".".join(map(str, place)) for place in unknown]


def _without(part: Any, place: tuple[int | str, ...]) -> Any:
    """place: of what is left out; steps that lead nowhere are the names of a union's members."""
    step, rest = place[0], place[1:]
    if isinstance(part, dict) and step in part:
        if not rest:
            return {name: value for name, value in part.items() if name != step}
        return {**part, step: _without(part[step], rest)}
    if isinstance(part, list) and isinstance(step, int):
        return [_without(item, rest) if index == step else item for index, item in enumerate(part)]
    return _without(part, rest) if rest else part


def ignored(body: BaseModel) -> list[str]:
    """Names of what the request says and nobody reads."""
    fields = type(body).model_fields
    return sorted(name for name in body.model_fields_set if fields[name].description == NOT_READ)
