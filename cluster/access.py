"""Who gets in: API keys of callers, the secrets that gateways and workers share. Reads their environment."""

import os
import secrets
from ipaddress import ip_address
from pathlib import Path

from cluster.settings import Settings
from protos.trust import SHORTEST_TOKEN, Trust

API_KEYS = "OUTRIDER_API_KEYS"  # separated by commas
TOKEN = "OUTRIDER_TOKEN"  # the same for every start of a deployment; without it each start draws one


def api_keys(settings: Settings) -> list[str]:
    """Those of the environment and of the file. Raises ValueError if the file cannot be read or is empty."""
    keys = os.environ.get(API_KEYS, "").split(",")
    if (file := settings.access.api_keys_file) is not None:
        lines = _read("access.api_keys_file", file).decode().splitlines()
        if not any(line.strip() for line in lines):
            raise ValueError(f"access.api_keys_file={file!r} holds no key: write one a line")
        keys += lines
    return [key.strip() for key in keys if key.strip()]


def shared_trust(settings: Settings) -> Trust:
    """Raises ValueError for a token that cannot be sent, and for certificates that lack a part."""
    # Their contents travel, not their paths: workers may run where there are no such files.
    files = settings.tls.model_dump(exclude_none=True)
    contents = {name: _read(f"tls.{name}", path) for name, path in files.items()}
    token = os.environ.get(TOKEN) or secrets.token_urlsafe()
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(f"{TOKEN} has {len(token)} characters, at least {SHORTEST_TOKEN} are needed")
    if not (token.isascii() and token.isprintable()):  # the header that it travels in takes no others
        raise ValueError(f"{TOKEN} must hold printable ASCII characters alone")
    return Trust.model_validate({"token": token, **contents})


def joining_trust(settings: Settings) -> Trust:
    """Of what joins a service that runs. Raises ValueError as ``shared_trust``, and without a token."""
    if not os.environ.get(TOKEN):
        raise ValueError(
            f"{TOKEN} is not set: what joins a service needs the token with which that was started"
        )
    return shared_trust(settings)


def check_access(settings: Settings, keys: list[str]) -> None:
    """Raises ValueError if callers from other machines are invited and none of them would need a key."""
    host = settings.addresses.http_host
    if not keys and not settings.access.allow_anonymous and not _is_loopback(host):
        raise ValueError(
            f"addresses.http_host={host!r} lets other machines ask, without API keys: give "
            f"access.api_keys_file or {API_KEYS}, or addresses.http_host=127.0.0.1, or waive them by "
            "access.allow_anonymous=true"
        )


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}={path!r} cannot be read: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
