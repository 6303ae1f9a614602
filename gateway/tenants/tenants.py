"""Tenants of a service, by the API keys of callers."""

import time
from collections.abc import Callable, Mapping

from gateway.settings import GatewaySettings
from gateway.tenants.shared_limits import SharedLimits
from gateway.tenants.tenant import UNNAMED, Tenant, TenantCounts

MAX_LABELS = 64  # tenants with a label of their own; further tenants count as OTHER
OTHER = "other"


class Tenants:
    """Finds the tenant of a caller. Callers whose key has no name share the tenant UNNAMED."""

    def __init__(self, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._unnamed = Tenant(UNNAMED)
        named = {name: Tenant(name, own, clock) for name, own in settings.tenants.items()}
        self._all = [self._unnamed, *named.values()]
        self._by_key: Mapping[str, Tenant] = {key: named[name] for key, name in settings.tenant_keys.items()}

    def of(self, caller: str | None) -> Tenant:
        """Returns the tenant of a caller, as ``Authentication.check`` names the caller."""
        return self._unnamed if caller is None else self._by_key.get(caller, self._unnamed)

    def share(self, limits: SharedLimits) -> None:
        """Applies the limits that all gateways share to every tenant with a limit."""
        for tenant in self._all:
            if tenant.is_limited:
                tenant.shared = limits

    def counts(self) -> dict[str, TenantCounts]:
        """Returns the counts since the gateway's start, by the tenants' labels."""
        by_label: dict[str, TenantCounts] = {}
        for place, tenant in enumerate(self._all):
            label = tenant.name if place < MAX_LABELS else OTHER
            by_label.setdefault(label, TenantCounts()).add(tenant.counts)
        return by_label
