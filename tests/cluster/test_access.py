"""Who gets in, as configured."""

from contextlib import nullcontext

import pytest

from cluster.access import (
    API_KEYS,
    TOKEN,
    api_keys,
    check_access,
    joining_trust,
    receipt_key,
    report_environment,
    shared_trust,
)
from cluster.arguments import read_settings
from tests.support.receipts import key, pem_of, public_pem_of

FILE = "access.api_keys_file"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(API_KEYS, raising=False)
    monkeypatch.delenv(TOKEN, raising=False)


def test_keys_come_from_the_environment_and_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv(API_KEYS, "one, two")
    file = tmp_path / "keys"
    file.write_text("three\n\n four\n")
    assert api_keys(read_settings({FILE: str(file)})) == ["one", "two", "three", "four"]
    assert api_keys(read_settings({})) == ["one", "two"]


def test_key_file_that_holds_none_or_is_not_there_is_named(tmp_path):
    (tmp_path / "keys").write_text("\n")
    for name in ("keys", "other"):
        with pytest.raises(ValueError, match=r"access\.api_keys_file="):
            api_keys(read_settings({FILE: str(tmp_path / name)}))


def test_key_of_receipts_comes_from_its_file(tmp_path):
    file = tmp_path / "receipts.pem"
    file.write_text(pem_of(key()))
    assert receipt_key(read_settings({"access.receipt_key_file": str(file)})) == pem_of(key())
    assert receipt_key(read_settings({})) is None


@pytest.mark.parametrize(
    "content", [b"no key", public_pem_of(key()), None], ids=["text", "public", "missing"]
)
def test_key_of_receipts_that_is_none_is_refused_by_its_setting(tmp_path, content):
    file = tmp_path / "receipts.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"access\.receipt_key_file="):
        receipt_key(read_settings({"access.receipt_key_file": str(file)}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_access_from_other_machines_needs_keys_or_a_waiver(host):
    invited = {"addresses.http_host": host}
    with pytest.raises(ValueError, match=f"addresses.http_host='{host}'.*access.allow_anonymous"):
        check_access(read_settings(invited), [], is_elsewhere=False)
    check_access(read_settings(invited), ["key"], is_elsewhere=False)
    check_access(read_settings({**invited, "access.allow_anonymous": "true"}), [], is_elsewhere=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_access_from_this_machine_needs_no_keys(host):
    check_access(read_settings({"addresses.http_host": host}), [], is_elsewhere=False)


@pytest.mark.parametrize(
    ("required", "is_elsewhere", "refused"),
    [
        ({}, True, "access.require_keys=None: .*the environment of `serve run` does not reach"),
        ({}, False, None),
        ({"access.require_keys": False}, True, None),
        ({"access.require_keys": True}, False, "access.require_keys=True: there are no API keys"),
    ],
)
def test_check_access_without_keys_refuses_where_they_are_required_or_may_have_been_lost(
    required, is_elsewhere, refused
):
    """Ray builds the application of a config file in a process with the environment of `ray start`."""
    settings = read_settings(required)
    check_access(settings, ["key"], is_elsewhere=is_elsewhere)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_access(settings, [], is_elsewhere=is_elsewhere)


def test_report_environment_names_what_is_set_and_no_value(monkeypatch):
    monkeypatch.setenv(API_KEYS, "a secret key")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    told = report_environment(is_elsewhere=True)
    assert told == (
        "the environment of this start is that of `ray start`, not of `serve run`; set in it: "
        "OUTRIDER_API_KEYS, OTEL_TRACES_EXPORTER"
    )


def test_shared_trust_draws_a_token_unless_it_is_given(monkeypatch):
    assert shared_trust(read_settings({})).token != shared_trust(read_settings({})).token
    monkeypatch.setenv(TOKEN, "sixteen characters or more")
    assert shared_trust(read_settings({})).token == "sixteen characters or more"


def test_joining_trust_without_the_token_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^OUTRIDER_TOKEN is not set"):
        joining_trust(read_settings({}))
    monkeypatch.setenv(TOKEN, "sixteen characters or more")
    assert joining_trust(read_settings({})).token == "sixteen characters or more"


@pytest.mark.parametrize(
    ("token", "wrong"),
    [("fifteen letters", "has 15 characters, at least 16 are needed"), ("ü" * 20, "printable ASCII")],
)
def test_token_that_cannot_be_used_is_named_and_not_shown(monkeypatch, token, wrong):
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ValueError, match=f"^OUTRIDER_TOKEN .*{wrong}") as refused:
        shared_trust(read_settings({}))
    assert token not in str(refused.value)


def test_certificates_travel_by_content(tmp_path):
    for name in ("certificate", "key", "authority"):
        (tmp_path / name).write_text(name.upper())
    paths = {f"tls.{name}": str(tmp_path / name) for name in ("certificate", "key", "authority")}
    trust = shared_trust(read_settings(paths))
    assert (trust.certificate, trust.key, trust.authority) == (b"CERTIFICATE", b"KEY", b"AUTHORITY")
    with pytest.raises(ValueError, match="belong together"):
        shared_trust(read_settings({"tls.key": paths["tls.key"]}))
    with pytest.raises(ValueError, match=r"tls\.key='/nowhere'"):
        shared_trust(read_settings({"tls.key": "/nowhere"}))
