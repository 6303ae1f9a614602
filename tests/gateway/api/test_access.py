"""Who may ask."""

import re

import pytest

from gateway.api.access import LOCAL, Authentication, digest, peer_host
from gateway.errors import UnauthenticatedError

KEYS = (digest("first-key"), digest("second-key"))


def allows(authentication, authorization=None, host="10.0.0.7"):
    try:
        authentication.check(authorization, host)
    except UnauthenticatedError:
        return False
    return True


@pytest.mark.parametrize("presented", ["Bearer first-key", "bearer second-key", "Bearer  first-key "])
def test_any_configured_key_is_accepted(presented):
    assert allows(Authentication(KEYS, anonymous=False), presented)


@pytest.mark.parametrize(
    "presented", [None, "", "Bearer", "Bearer other", "first-key", "Basic first-key", f"Bearer {KEYS[0]}"]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7"])
def test_nothing_else_is_not_even_on_this_machine(presented, host):
    assert not allows(Authentication(KEYS, anonymous=False), presented, host)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("example.org", False),
        (None, False),
    ],
)
def test_without_keys_only_this_machine_is_answered(host, allowed):
    assert allows(Authentication((), anonymous=False), host=host) is allowed
    assert allows(Authentication((), anonymous=True), host=host)


def test_who_asks_is_told_by_the_key_or_by_being_on_this_machine():
    with_keys, without = Authentication(KEYS, anonymous=False), Authentication((), anonymous=True)
    assert with_keys.check("Bearer first-key", "127.0.0.1") == KEYS[0]
    assert with_keys.check("bearer  second-key", None) == KEYS[1]
    assert without.check("Bearer first-key", "127.0.0.1") == LOCAL
    assert without.check("Bearer first-key", "10.0.0.7") is None


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:[::ffff:10.0.0.7]:1", "::ffff:10.0.0.7"),
        ("unix:/tmp/socket", "127.0.0.1"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_the_peers_that_grpc_names(peer, host):
    assert peer_host(peer) == host


@pytest.mark.parametrize(
    ("keys", "anonymous", "told"),
    [
        (KEYS, False, "every caller needs an API key"),
        (KEYS, True, "every caller needs an API key"),
        ((), True, "anybody is answered without an API key"),
        ((), False, "callers on this machine need no API key, nor does .* a proxy on it"),
    ],
)
def test_authentication_says_who_is_answered_without_a_key(keys, anonymous, told):
    assert re.match(told, Authentication(keys, anonymous=anonymous).told)
