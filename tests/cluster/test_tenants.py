"""The file of tenants: what it may hold, and how it is refused without repeating a key."""

import pickle

import pytest

from cluster.arguments import read_settings
from cluster.tenants import caller_settings, read_tenants
from gateway.api.access import digest
from gateway.settings import TenantSettings
from gateway.tenants.tenants import Tenants

FILE = "access.tenants_file"
SECRET = "sk-do-not-repeat"


def tenants_of(tmp_path, text):
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    return read_tenants(read_settings({FILE: str(file)}))


def test_tenants_have_keys_and_limits(tmp_path):
    tenants = tenants_of(
        tmp_path,
        "search:\n  keys: [one, two]\n  weight: 2\n  tokens_per_minute: 60000\n"
        "night-jobs:\n  keys: [three]\n  highest_priority: batch\n",
    )
    assert {name: tenant.keys for name, tenant in tenants.items()} == {
        "search": ("one", "two"),
        "night-jobs": ("three",),
    }
    assert tenants["search"].settings == TenantSettings(weight=2.0, tokens_per_minute=60000)
    assert tenants["night-jobs"].settings == TenantSettings(highest_priority="batch")
    assert "'one'" not in repr(tenants)


def test_gateways_know_tenants_and_digests_of_keys_alone(tmp_path):
    tenants = tenants_of(tmp_path, f"search: {{keys: [{SECRET}], weight: 2}}")
    settings = read_settings({"gateway.replicas": 3}).gateway_settings()
    settings = settings.model_copy(update=caller_settings([SECRET, "sk-plain"], tenants))
    assert SECRET.encode() not in pickle.dumps(settings)
    assert settings.api_key_digests == (digest(SECRET), digest("sk-plain"))
    found = Tenants(settings)
    assert (found.of(digest(SECRET)).name, found.of(digest("sk-plain")).name) == ("search", "unnamed")
    assert found.of(digest(SECRET)).weight == 2
    assert digest(SECRET) not in repr(settings)


def test_deployment_without_a_file_has_no_tenants():
    assert read_tenants(read_settings({})) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no tenant"),
        (f"- {SECRET}", "holds no tenant"),
        (f"a: {{keys: ['{SECRET}'", "is no YAML"),
        (f"other: {{keys: [{SECRET}]}}", "'other' is no name for a tenant"),
        (f"unnamed: {{keys: [{SECRET}]}}", "'unnamed' is no name for a tenant"),
        (f"'a b': {{keys: [{SECRET}]}}", "'a b' is no name for a tenant"),
        (f"7: {{keys: [{SECRET}]}}", "7 is no name for a tenant"),
        ("a: {weight: 1}", "a.keys: Field required"),
        ("a: {keys: []}", "a.keys: Tuple should have at least 1 item"),
        (f"a: {{keys: {SECRET}}}", "a.keys: Input should be a valid tuple"),
        (f"a: {{keys: ['{SECRET} ']}}", "a.keys.0: String should match pattern"),
        (f"a: {{keys: [{SECRET}], weight: 0}}", "a.weight: Input should be greater than 0, got 0"),
        (
            f"a: {{keys: [{SECRET}], parallel_requests: 0}}",
            "a.parallel_requests: Input should be greater than or equal to 1",
        ),
        (f"a: {{keys: [{SECRET}], highest_priority: top}}", "Input should be 'interactive' or 'batch', got"),
        (f"a: {{keys: [{SECRET}], rpm: 5}}", "a.rpm: Extra inputs are not permitted, got 5: weight, "),
        (f"a: {{keys: [{SECRET}]}}\nb: {{keys: [{SECRET}]}}", "a and b have a key in common"),
    ],
)
def test_file_that_is_not_accepted_is_refused_without_its_keys(tmp_path, text, told):
    with pytest.raises(ValueError, match=r"access\.tenants_file=") as refused:
        tenants_of(tmp_path, text)
    assert told in str(refused.value)
    assert SECRET not in str(refused.value)


def test_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"access\.tenants_file=.*cannot be read"):
        read_tenants(read_settings({FILE: str(tmp_path / "nothing")}))
