"""Limits of all tenants in one actor: any gateway can give all of a limit, all together give no more."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from gateway.errors import LimitReachedError
from gateway.settings import TenantSettings
from gateway.tenants.allowance import Allowance, Levels

LIMITS = "limits"  # name of the actor that Serve keeps for the deployment of the gateway
HEARTBEAT_S = 1.0  # seconds between two heartbeats of a gateway
SILENT_S = 5.0  # seconds (five heartbeats) without a message, after which a gateway counts as lost
ANSWER_S = 0.5  # seconds; timeout of a call, which a live actor answers within milliseconds
AWAY_S = 5.0  # seconds for which an actor that does not answer is not asked again

logger = logging.getLogger(f"ray.serve.{__name__}")


class AllLimits:
    """Allowances of all tenants with a limit. Serve runs it as an actor if there are several gateways."""

    def __init__(
        self, tenants: Mapping[str, TenantSettings], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """clock: returns seconds."""
        self._allowances = {name: Allowance(name, own, clock) for name, own in tenants.items()}
        self._clock = clock
        self._last_seen: dict[str, float] = {}  # time of the last message by gateway

    async def take(
        self, gateway: str, tenant: str, tokens: float, under_way: int
    ) -> tuple[LimitReachedError | None, Levels]:
        """Charges a request as ``Allowance.take`` does. Returns the refusal, or None, and the new state."""
        self._note_alive(gateway)
        allowance = self._allowances[tenant]
        refusal: LimitReachedError | None = None
        try:
            allowance.take(gateway, tokens, under_way)
        except LimitReachedError as error:
            refusal = error.with_traceback(None)
        return refusal, allowance.levels(gateway)

    async def settle(self, gateway: str, tenant: str, tokens: float, under_way: int) -> None:
        """Charges used tokens as ``Allowance.settle`` does."""
        self._note_alive(gateway)
        self._allowances[tenant].settle(gateway, tokens, under_way)

    async def heartbeat(self, gateway: str, under_way: Mapping[str, int]) -> None:
        """Receives a gateway's heartbeat. under_way: its requests under way by tenant."""
        self._note_alive(gateway)
        for tenant, count in under_way.items():
            self._allowances[tenant].set_under_way(gateway, count)

    def _note_alive(self, gateway: str) -> None:
        now = self._clock()
        self._last_seen[gateway] = now
        for lost in [name for name, seen in self._last_seen.items() if now - seen > SILENT_S]:
            del self._last_seen[lost]
            for allowance in self._allowances.values():
                allowance.forget(lost)


class SharedLimits:
    """Client of the actor that holds the limits."""

    def __init__(self, actor: Callable[[], Any]) -> None:
        """actor: returns the actor's handle, or raises ValueError if the actor is lost."""
        self._find = actor
        self._actor: Any = None
        self._away_until = 0.0  # the event loop's time
        self._gateway = uuid.uuid4().hex
        self._under_way: dict[str, int] = {}  # requests by tenant
        self._heartbeats: asyncio.Task[None] | None = None

    async def take(
        self, tenant: str, tokens: float, under_way: int
    ) -> tuple[LimitReachedError | None, Levels] | None:
        """Returns what ``AllLimits.take`` does; None if the actor is lost, until Serve has replaced it."""
        loop = asyncio.get_running_loop()
        if self._heartbeats is None:
            self._heartbeats = loop.create_task(self._send_heartbeats())
        if (asked := self._send("take", tenant, tokens, under_way)) is None:
            return None
        from ray.exceptions import RayError

        try:
            async with asyncio.timeout(ANSWER_S):
                told: tuple[LimitReachedError | None, Levels] = await asked
        except (RayError, TimeoutError) as error:
            self._lose(error)
            return None
        return told

    def settle(self, tenant: str, tokens: float, under_way: int) -> None:
        """Reports what a request used. Does not wait."""
        self._send("settle", tenant, tokens, under_way)

    def close(self) -> None:
        """Ends the heartbeats of this gateway."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if (actor := self._found()) is not None:
                actor.heartbeat.remote(self._gateway, {**self._under_way})

    def _send(self, method: str, tenant: str, tokens: float, under_way: int) -> Any:
        """Calls a method of the actor. Returns an awaitable answer; None if the actor is lost."""
        self._under_way[tenant] = under_way
        if (actor := self._found()) is None:
            return None
        return getattr(actor, method).remote(self._gateway, tenant, tokens, under_way)

    def _found(self) -> Any:
        """Returns the actor; None if it is lost."""
        if self._actor is None and asyncio.get_running_loop().time() >= self._away_until:
            try:
                self._actor = self._find()
            except ValueError as error:
                self._lose(error)
        return self._actor

    def _lose(self, error: Exception) -> None:
        logger.warning("limits of tenants are this gateway's own for %g s: %r", AWAY_S, error)
        self._actor, self._away_until = None, asyncio.get_running_loop().time() + AWAY_S
