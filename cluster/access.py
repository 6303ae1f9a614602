"""Access: API keys of callers, and secrets of gateways and workers, from their environment."""

import os
import secrets
from ipaddress import ip_address
from pathlib import Path

from cluster.settings import Settings
from cluster.tracing import EXPORTER, FILE
from outrider.receipts.receipt import private_key
from outrider.telemetry.debug_lines import ROOMS
from protos.trust import SHORTEST_TOKEN, Trust

API_KEYS = "OUTRIDER_API_KEYS"  # separated by commas
TRACING = EXPORTER, FILE
TOKEN = "OUTRIDER_TOKEN"  # one value for all starts of a deployment; without it each start draws a token


def api_keys(settings: Settings) -> list[str]:
    """Returns the keys from environment and file. Raises ValueError if the file is unreadable or empty."""
    keys = os.environ.get(API_KEYS, "").split(",")
    if (file := settings.access.api_keys_file) is not None:
        lines = read_file("access.api_keys_file", file).decode().splitlines()
        if not any(line.strip() for line in lines):
            raise ValueError(f"access.api_keys_file={file!r} holds no key: write one a line")
        keys += lines
    return [key.strip() for key in keys if key.strip()]


def receipt_key(settings: Settings) -> str | None:
    """Returns the PEM of the key that signs receipts; None if no key is set. Raises ValueError."""
    if (file := settings.access.receipt_key_file) is None:
        return None
    pem = read_file("access.receipt_key_file", file)
    try:
        private_key(pem)
    except ValueError as error:
        raise ValueError(f"access.receipt_key_file={file!r}: {error}") from error
    return pem.decode()


def shared_trust(settings: Settings) -> Trust:
    """Returns the credentials of all processes. Raises ValueError for a wrong token or unreadable file."""
    # Contents are sent, not paths: a worker's machine may not have these files.
    files = settings.tls.model_dump(exclude_none=True)
    contents = {name: read_file(f"tls.{name}", path) for name, path in files.items()}
    token = os.environ.get(TOKEN) or secrets.token_urlsafe()
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(f"{TOKEN} has {len(token)} characters, at least {SHORTEST_TOKEN} are needed")
    if not (token.isascii() and token.isprintable()):  # the header takes no other characters
        raise ValueError(f"{TOKEN} must hold printable ASCII characters alone")
    return Trust.model_validate({"token": token, **contents})


def joining_trust(settings: Settings) -> Trust:
    """Returns the credentials of a joining draft. Raises ValueError as ``shared_trust``, or for no token."""
    if not os.environ.get(TOKEN):
        raise ValueError(
            f"{TOKEN} is not set: a process that joins a service needs the token that it was started with"
        )
    return shared_trust(settings)


def check_access(settings: Settings, keys: list[str], *, is_elsewhere: bool) -> None:
    """Checks that there are API keys if callers must have them.

    Args:
        is_elsewhere: whether Ray runs this in a process of its own, as for a config file. That process has
            the environment of ``ray start``, so API keys in the environment of ``serve run`` are not seen.

    Raises:
        ValueError: there are no keys though they are required, or other machines could call without a key.
    """
    access = settings.access
    if not keys and (access.require_keys or (access.require_keys is None and is_elsewhere)):
        why = (
            f"; {API_KEYS} in the environment of `serve run` does not reach an application of a config file"
            if is_elsewhere
            else ""
        )
        raise ValueError(
            f"access.require_keys={access.require_keys}: there are no API keys{why}. Give "
            f"access.api_keys_file, or {API_KEYS} to `ray start` or in the application's runtime_env; or "
            "answer callers without keys by access.require_keys=false"
        )
    host = settings.addresses.http_host
    if not keys and not settings.access.allow_anonymous and not _is_loopback(host):
        raise ValueError(
            f"addresses.http_host={host!r} lets other machines ask, without API keys: give "
            f"access.api_keys_file or {API_KEYS}, or addresses.http_host=127.0.0.1, or waive them by "
            "access.allow_anonymous=true"
        )


def report_environment(*, is_elsewhere: bool) -> str:
    """Returns a line with the names of the variables that the start has found, without their values."""
    found = [name for name in (API_KEYS, TOKEN, ROOMS, *TRACING) if os.environ.get(name)]
    where = "that of `ray start`, not of `serve run`" if is_elsewhere else "that of this command"
    return f"the environment of this start is {where}; set in it: {', '.join(found) or 'nothing of ours'}"


def read_file(setting: str, path: str) -> bytes:
    """Returns the bytes of a file. Raises ValueError, which names the setting, if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{setting}={path!r} cannot be read: {error.strerror}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
