"""The files beside a tokenizer that say how a chat is written, read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from gateway.api.openai.chat_template import ChatTemplate

TEMPLATE, CONFIG, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
OF_TOOLS = "additional_chat_templates/tool_use.jinja"
OF_PROCESSOR = "chat_template.json"  # of models that take pictures too


def load_chat_template(source: str) -> ChatTemplate:
    """Returns the template of the tokenizer in a local folder, or of a hub id."""
    config = _json(source, CONFIG)
    template, with_tools = _read(source, TEMPLATE) or config.get("chat_template"), None
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template, with_tools = named.get("default"), named.get("tool_use")
    return ChatTemplate(
        template or _json(source, OF_PROCESSOR).get("chat_template"),
        _special_tokens(config, _json(source, TOKENS)),
        with_tools=_read(source, OF_TOOLS) or with_tools,
        response_template=config.get("response_template"),
    )


def _special_tokens(config: dict[str, Any], of_map: dict[str, Any]) -> dict[str, str]:
    """Returns the text of each by its name. The tokenizer's config wins over the older file."""
    extra = config.get("extra_special_tokens")
    named = {**of_map, **(extra if isinstance(extra, dict) else {})}
    named |= {name: token for name, token in config.items() if token is not None}
    texts = {name: _content(token) for name, token in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _json(source: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_read(source, name) or "{}")
    return found


def _read(source: str, name: str) -> str | None:
    folder = Path(source)
    if folder.is_dir():
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name)).read_text(encoding="utf-8")
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None
