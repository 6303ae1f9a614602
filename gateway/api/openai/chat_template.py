"""The chat template of a tokenizer, rendered as transformers does but without it: it would bring torch."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import InvalidRequestError

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class AssistantText(Extension):
    """``{% generation %}``, by which templates mark for training what an assistant wrote: only read over."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        """
        Args:
            source: the template's text; None if the model has none.
            special_tokens: by the names that templates know: bos_token, eos_token, ...
        """
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, AssistantText]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = None if source is None else environment.from_string(source)

    def render(self, messages: list[dict[str, str]], *, begin_answer: bool = True) -> str:
        """The text that the model is to go on from.

        begin_answer: with its own turn begun.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise InvalidRequestError("messages", "this model has no chat template, ask /v1/completions")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=begin_answer,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error
        except Exception as error:  # a template is a program: it can fail in any way
            kind = type(error).__name__  # its message may repeat a prompt
            raise InvalidRequestError("messages", f"the model's chat template fails with {kind}") from error


def load_chat_template(source: str) -> ChatTemplate:
    """Of the tokenizer in a local folder, or of a hub id."""
    config = json.loads(_read(source, CONFIG) or "{}")
    template = _read(source, TEMPLATE) or config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token") and value}
    return ChatTemplate(template, {name: text for name, text in tokens.items() if isinstance(text, str)})


def _read(source: str, name: str) -> str | None:
    folder = Path(source)
    if folder.is_dir():
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name)).read_text(encoding="utf-8")
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
