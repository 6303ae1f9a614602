"""Tenants of a deployment, from the file that holds their names, keys and limits."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from cluster.access import read_file
from cluster.settings import Settings
from gateway.api.access import digest
from gateway.settings import TenantSettings
from gateway.tenants.tenant import UNNAMED
from gateway.tenants.tenants import OTHER

SETTING = "access.tenants_file"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # names become labels of metrics
NAMES = "letters, digits, '.', '_' and '-', at most 64 characters"

ApiKey = Annotated[str, Field(pattern=r"^\S+$")]


class Tenancy(TenantSettings):
    """Tenant as the file describes it."""

    keys: tuple[ApiKey, ...] = Field(min_length=1, repr=False, description="API keys of its callers")

    @property
    def settings(self) -> TenantSettings:
        """Settings for the gateways, without the keys."""
        return TenantSettings.model_validate(self.model_dump(exclude={"keys"}))


def read_tenants(settings: Settings) -> dict[str, Tenancy]:
    """Returns the tenants by name; empty without a file.

    Raises:
        ValueError: the file cannot be read, or something in it is not accepted. No message repeats a key.
    """
    if (path := settings.access.tenants_file) is None:
        return {}
    where = f"{SETTING}={path!r}"
    try:
        given = yaml.safe_load(read_file(SETTING, path))
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no YAML: it could repeat a key to say more") from error
    if not isinstance(given, dict) or not given:
        raise ValueError(f"{where} holds no tenant: write one as 'name: {{keys: [an API key]}}'")
    for name in given:
        if not (isinstance(name, str) and NAME.fullmatch(name)) or name in (UNNAMED, OTHER):
            raise ValueError(
                f"{where}: {name!r} is no name for a tenant: {NAMES} are, {UNNAMED} and {OTHER} are taken"
            )
    try:
        tenants = TypeAdapter(dict[str, Tenancy]).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{where}: {_refusal(error)}") from None  # the text of the cause contains the keys
    times = Counter(key for tenant in tenants.values() for key in {*tenant.keys})
    if shared := [name for name, tenant in tenants.items() if any(times[key] > 1 for key in tenant.keys)]:
        raise ValueError(f"{where}: {' and '.join(shared)} have a key in common: give each its own")
    return tenants


def caller_settings(keys: Iterable[str], tenants: Mapping[str, Tenancy]) -> dict[str, Any]:
    """Returns the fields of a gateway's settings for access, with digests in place of keys.

    keys: API keys without a tenant.
    """
    names = {digest(key): name for name, tenant in tenants.items() for key in tenant.keys}
    return {
        "api_key_digests": (*dict.fromkeys([*map(digest, keys), *names]),),
        "tenants": {name: tenant.settings for name, tenant in tenants.items()},
        "tenant_keys": names,
    }


def _refusal(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    got: Any = "" if "keys" in path or isinstance(first["input"], dict) else f", got {first['input']!r}"
    fields = ", ".join(Tenancy.model_fields)
    known = f": {fields} are known" if first["type"] == "extra_forbidden" else ""
    return f"{'.'.join(path)}: {first['msg']}{got}{known}"
