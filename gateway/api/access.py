"""Who may ask: API keys, compared in constant time; without keys only callers on this machine."""

import hashlib
import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from gateway.errors import UnauthenticatedError

LOCAL = "this machine"
LOCAL_NAMES = "localhost and loopback addresses are accepted there"
NEEDED = "an API key is needed: send it as 'Authorization: Bearer <key>'"


def digest(key: str) -> str:
    """What a gateway keeps of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def who_is_answered(has_keys: bool, *, anonymous: bool) -> str:
    """Says in one line whether callers need an API key, and which do not."""
    if has_keys:
        return "every caller needs an API key"
    if anonymous:
        return "anybody is answered without an API key"
    return "callers on this machine need no API key, nor does whatever a proxy on it passes on"


class Authentication:
    """Decides by the key presented, or by the caller's address where no keys are configured."""

    def __init__(self, key_digests: tuple[str, ...], *, anonymous: bool) -> None:
        """anonymous: whether anyone may ask without a key, from anywhere."""
        self.told = who_is_answered(bool(key_digests), anonymous=anonymous)
        self._key_digests = key_digests
        self._anonymous = anonymous

    def check(
        self, authorization: str | None, host: str | None, foreign_name: str | None = None
    ) -> str | None:
        """Who asks: the digest of a key, LOCAL for callers on this machine without one, None for anybody.

        Args:
            authorization: the header's or metadata's value.
            host: address of the caller, None if it is not known.
            foreign_name: as the function says. The caller may be a browser with another site's page.

        Raises:
            UnauthenticatedError: the caller may not ask; the message says what would be accepted.
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
        # Every key is compared, so that the time taken tells nothing about which one came close.
        matches = [hmac.compare_digest(presented, known) for known in self._key_digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise UnauthenticatedError(NEEDED)
        return presented


def foreign_name(headers: Mapping[str, str]) -> str | None:
    """Returns which header names another machine than this one, with its value; None if none does.

    A page from elsewhere can have its own name resolved to a loopback address, and then ask as if it was from
    here (DNS rebinding). Its name still stands in Host, and in Origin.
    """
    addresses = {
        "Host": f"//{headers.get('host', 'localhost')}",
        "Origin": headers.get("origin", "//localhost"),
    }
    for header, address in addresses.items():
        try:
            name = urlsplit(address).hostname or ""
        except ValueError:
            name = ""
        if not (name.endswith(".localhost") or _is_loopback(name)):
            return f"{header} {address.removeprefix('//')!r}"
    return None


def peer_host(peer: str) -> str | None:
    """The address in gRPC's name for it: ``ipv4:127.0.0.1:5000``, ``ipv6:%5B::1%5D:5000``, ``unix:...``."""
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
