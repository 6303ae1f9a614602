"""The public files next to a checkpoint's weights, read from a folder or the hub. Torch-free."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

TOKENIZER_CONFIG = "tokenizer_config.json"


def read(source: str, name: str) -> str | None:
    """Returns a file's text; None if there is no such file.

    source: local folder or hub id.
    """
    folder = Path(source)
    if folder.is_dir():
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name)).read_text(encoding="utf-8")
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None


def read_json(source: str, name: str) -> dict[str, Any]:
    """Returns the fields of a JSON file; an empty dict if there is no such file."""
    found: dict[str, Any] = json.loads(read(source, name) or "{}")
    return found


def special_tokens(source: str) -> dict[str, str]:
    """Returns the text of each special token by its name, such as bos_token.

    The tokenizer's config wins over the older special_tokens_map.json.
    """
    config = read_json(source, TOKENIZER_CONFIG)
    extra = config.get("extra_special_tokens")
    named = {**read_json(source, "special_tokens_map.json"), **(extra if isinstance(extra, dict) else {})}
    named |= {name: token for name, token in config.items() if token is not None}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def end_of_text(source: str) -> int | None:
    """Returns the id of the tokenizer's eos_token; None if no file gives one."""
    text = special_tokens(source).get("eos_token")
    if text is None:
        return None
    decoder = read_json(source, TOKENIZER_CONFIG).get("added_tokens_decoder") or {}
    ids = {token["content"]: int(token_id) for token_id, token in decoder.items()}
    if text not in ids:
        tokenizer = read_json(source, "tokenizer.json")
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = vocabulary if isinstance(vocabulary, dict) else {}
        ids = {**ids, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}}
    return ids.get(text)
