"""Checks of callers: keys, addresses and names of machines."""

import re

import pytest

from gateway.api.access import LOCAL, Authentication, digest, foreign_name, peer_host
from gateway.errors import UnauthenticatedError
from tests.fakes.scripted import ScriptedTarget
from tests.support.http_calls import ANSWER, ASK, client_of

KEYS = (digest("first-key"), digest("second-key"))


def allows(authentication, authorization=None, host="10.0.0.7"):
    try:
        authentication.check(authorization, host)
    except UnauthenticatedError:
        return False
    return True


@pytest.mark.parametrize("presented", ["Bearer first-key", "bearer second-key", "Bearer  first-key "])
def test_check_configured_key_is_accepted(presented):
    assert allows(Authentication(KEYS, anonymous=False), presented)


@pytest.mark.parametrize(
    "presented", [None, "", "Bearer", "Bearer other", "first-key", "Basic first-key", f"Bearer {KEYS[0]}"]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7"])
def test_check_wrong_key_is_refused_even_on_this_machine(presented, host):
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
def test_check_without_keys_accepts_this_machine_alone(host, allowed):
    assert allows(Authentication((), anonymous=False), host=host) is allowed
    assert allows(Authentication((), anonymous=True), host=host)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"host": "localhost:8000"},
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "models.localhost", "origin": "http://localhost:3000"},
    ],
)
def test_foreign_name_of_names_of_this_machine_is_none(headers):
    assert foreign_name(headers) is None


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"host": "evil.example:8000"}, "Host 'evil.example:8000'"),
        ({"host": "localhost.evil.example"}, "Host 'localhost.evil.example'"),
        ({"host": "10.0.0.7:8000"}, "Host '10.0.0.7:8000'"),
        ({"host": "[evil"}, "Host '[evil'"),
        ({"host": ""}, "Host ''"),
        ({"host": "localhost", "origin": "https://evil.example"}, "Origin 'https://evil.example'"),
        ({"host": "localhost", "origin": "null"}, "Origin 'null'"),
    ],
)
def test_foreign_name_of_another_machines_name_tells_header_and_value(headers, told):
    assert foreign_name(headers) == told


def test_check_foreign_name_on_this_machine_is_refused_unless_anybody_may_ask():
    with pytest.raises(UnauthenticatedError, match="Host 'evil' is refused: localhost"):
        Authentication((), anonymous=False).check(None, "127.0.0.1", "Host 'evil'")
    assert Authentication((), anonymous=True).check(None, "127.0.0.1", "Host 'evil'") is None
    assert (
        Authentication(KEYS, anonymous=False).check("Bearer first-key", "127.0.0.1", "Host 'evil'") == KEYS[0]
    )


@pytest.mark.parametrize(
    "foreign", [{"Host": "evil.example:8000"}, {"Origin": "http://evil.example:8000"}], ids=["Host", "Origin"]
)
async def test_endpoints_asked_by_a_page_from_elsewhere_are_refused(tokenizer, foreign):
    async with client_of(tokenizer, ScriptedTarget(ANSWER)) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
            refused = await client.post(path, json=ASK, headers=foreign)
            assert refused.status_code == 401, path
            assert "evil.example" in refused.json()["error"]["message"]
        for path in ("/v1/models", "/v1/models/m", "/loads"):
            assert (await client.get(path, headers=foreign)).status_code == 401, path
        assert (await client.get("/health", headers=foreign)).json().keys() == {"status"}


def test_authentication_key_or_own_machine_names_the_caller():
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
def test_peer_host_of_each_form_of_grpc_is_read(peer, host):
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
    assert re.match(told, Authentication(keys, anonymous=anonymous).policy)
