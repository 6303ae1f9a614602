"""Access control: API keys, compared in constant time; without keys only callers on this machine."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from gateway.errors import UnauthenticatedError

LOCAL = "this machine"
LOCAL_NAMES = "localhost and loopback addresses are accepted there"
NEEDED = "an API key is needed: send it as 'Authorization: Bearer <key>'"


def digest(key: str) -> str:
    """Returns the SHA-256 of an API key in hexadecimal. A gateway keeps nothing else of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


def who_is_answered(has_keys: bool, *, anonymous: bool) -> str:
    """Returns a sentence that says which callers need an API key."""
    if has_keys:
        return "every caller needs an API key"
    if anonymous:
        return "anybody is answered without an API key"
    return "callers on this machine need no API key, nor does whatever a proxy on it passes on"


class Authentication:
    """Admits callers by their key, or by their address if no keys are configured."""

    def __init__(self, key_digests: tuple[str, ...], *, anonymous: bool) -> None:
        """anonymous: whether callers on other machines are admitted too if no keys are configured."""
        self.policy = who_is_answered(bool(key_digests), anonymous=anonymous)
        self._key_digests = key_digests
        self._anonymous = anonymous

    def check(
        self, authorization: str | None, host: str | None, foreign_name: str | None = None
    ) -> str | None:
        """Returns the caller's name: the digest of its key, LOCAL for this machine, None for other callers.

        Args:
            authorization: value of the header or of the metadata.
            host: address of the caller; None: unknown.
            foreign_name: result of ``foreign_name``; not None if another site's page may be calling from a
                browser.

        Raises:
            UnauthenticatedError: the caller is refused; the message says what is accepted.
        """
        if not self._key_digests:
            if _is_loopback(host) and foreign_name is None:
                return LOCAL
            if self._anonymous:
                return None
            if _is_loopback(host):
                raise UnauthenticatedError(f"without API keys {foreign_name} is refused: {LOCAL_NAMES}")
            raise UnauthenticatedError("without API keys only callers on this machine are answered")
        scheme, _, key = (authorization or "").partition(" ")
        presented = digest(key.strip())
        # All keys are compared, so that the time taken does not reveal which key is similar.
        matches = [hmac.compare_digest(presented, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthenticatedError(NEEDED)
        return presented


def foreign_name(headers: Mapping[str, str], allowed_origins: Collection[str] = ()) -> str | None:
    """Returns the header that names another machine, with its value; None if no header does.

    allowed_origins: other sites whose pages may send requests.

    The name of a site can resolve to a loopback address, so that its page seems to call from this machine
    (DNS rebinding). Host and Origin still have the site's name.
    """
    addresses = {
        "Host": f"//{headers.get('host', 'localhost')}",
        "Origin": headers.get("origin", "//localhost"),
    }
    if addresses["Origin"] in allowed_origins:
        del addresses["Origin"]
    for header, address in addresses.items():
        try:
            name = urlsplit(address).hostname or ""
        except ValueError:
            name = ""
        if not (name.endswith(".localhost") or _is_loopback(name)):
            return f"{header} {address.removeprefix('//')!r}"
    return None


def peer_host(peer: str) -> str | None:
    """Returns the host of a gRPC peer: ``ipv4:127.0.0.1:5000``, ``ipv6:%5B::1%5D:5000``, ``unix:...``."""
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return "127.0.0.1"
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None


def _is_loopback(host: str | None) -> bool:
    try:
        address = ip_address(host or "")
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
