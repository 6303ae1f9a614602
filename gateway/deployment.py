"""Gateway as a Ray Serve deployment: the HTTP API and the gRPC API share one Generation."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import ValidationError

from gateway.api import http_api
from gateway.api.access import Authentication
from gateway.api.direct import direct_server
from gateway.api.grpc_api import GenerationServicer
from gateway.api.openai.chat_template import load_chat_template
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.proxy_http import bound_heads
from gateway.api.refusals_log import shorten_refusals
from gateway.generation.answer_store import SharedAnswers
from gateway.generation.generation import Generation
from gateway.generation.sampling_defaults import load_sampling_defaults
from gateway.generation.vocabulary import load_tokenizer
from gateway.observe.metrics import publish_always
from gateway.settings import GatewaySettings, LiveSettings, live_refusal
from gateway.tenants.shared_limits import LIMITS, SharedLimits
from gateway.workers import registry
from gateway.workers.adapter_store import RayAdapterStore
from gateway.workers.fleet import Fleet
from outrider.pace.settings import PaceSettings
from outrider.telemetry.debug_lines import show_debug_lines
from outrider.telemetry.exposition import Exposition
from outrider.telemetry.instruments import Instruments
from outrider.telemetry.metrics import OF_GATEWAYS
from protos.trust import Trust

logger = logging.getLogger(f"ray.serve.{__name__}")


def draft_deployment(name: str) -> str:
    """Returns the name of the Serve deployment of a draft."""
    return f"draft-{name}"


def _handle_of(name: str) -> Any:
    """Returns the handle of a draft that is a Serve application of its own, which may start later."""
    from ray.serve.handle import DeploymentHandle  # imported here: takes a second, only replicas need it

    return DeploymentHandle(draft_deployment(name), name).options()


class Gateway(GenerationServicer):
    def __init__(
        self,
        settings: GatewaySettings,
        trust: Trust,
        start_tracing: Callable[[], Callable[[], None]],
        worker_handles: list[Any],
        pace: PaceSettings,
    ) -> None:
        """
        Args:
            start_tracing: starts tracing in this process; returns a function that ends it.
            pace: initial settings, in force until ``reconfigure`` replaces them.
        """
        show_debug_lines()
        bound_heads()  # with HAProxy as Serve's proxy, this process parses HTTP
        shorten_refusals()
        self._leaving = AsyncExitStack()  # callbacks for the shutdown, run in reverse order
        self._leaving.callback(start_tracing())
        # From ``options()`` on, Serve keeps the table of the handle's workers up to date.
        self._handles = [handle.options() for handle in worker_handles]
        self._joined: dict[str, Any] = {}  # handles of drafts that joined the running service
        fleet = Fleet(registry.workers, trust)
        self.authentication = Authentication(settings.api_key_digests, anonymous=settings.allow_anonymous)
        self._template = load_chat_template(settings.tokenizer)
        defaults = load_sampling_defaults(settings)
        tokenizer, store = load_tokenizer(settings.tokenizer), None
        if settings.adapter_folder is not None:
            store = RayAdapterStore(f"{settings.model}\n{settings.adapter_folder}")
        self.generation = Generation(settings, tokenizer, fleet, defaults, store)
        self.chat_prompts = ChatPrompts.of(self._template, self.generation)
        self.generation.paces.use(pace)
        self.generation.warm_up()
        self._leaving.callback(self.generation.close)
        if self.generation.recorder is not None:
            self._leaving.callback(self.generation.recorder.close)
        self._exposition = Exposition(self.generation.totals.gateway)
        instruments = Instruments(OF_GATEWAYS, self._exposition.instrument)
        publishing = publish_always(self.generation, instruments)
        self._publishing = asyncio.get_running_loop().create_task(publishing)
        if settings.direct_grpc is not None:
            server, _ = direct_server(self, settings.direct_grpc, settings.max_message_bytes)
            self._starting = asyncio.get_running_loop().create_task(server.start())
            self._leaving.push_async_callback(server.stop, settings.request_deadline_s)

    def reconfigure(self, user_config: Any) -> None:
        """Applies the live settings; Serve calls it at the start and whenever ``user_config`` changes.

        A new pace applies to running requests too. If this raised, Serve would stop the replica, and then
        each replacement of it. So invalid settings are only logged and shown by /health, and the earlier
        settings stay in force.
        """
        try:
            live = LiveSettings.model_validate(user_config)
            self.generation.use(live)
        except ValueError as error:
            refusal = live_refusal(error) if isinstance(error, ValidationError) else f"user_config.{error}"
            self.generation.refused_live = refusal
            logger.error("live settings are refused, what was in force stays: %s", refusal)
            return
        self.generation.refused_live = None
        for name in live.drafts.keys() - self._joined.keys():
            self._joined[name] = _handle_of(name)

    async def leave(self, within_s: float) -> int:
        """Refuses new requests and waits for the running requests; returns how many there were.

        Requests that still run after ``within_s`` seconds end with an error. ``cluster/stop.py`` calls this
        on every gateway before it shuts Serve down.
        """
        return await self.generation.leave(within_s)

    async def __del__(self) -> None:
        """Ends what the gateway has started. Serve awaits this before the replica ends."""
        await self._leaving.aclose()

    def __serve_build_asgi_app__(self) -> FastAPI:
        from ray import serve  # imported here: takes a second, only replicas need it

        if serve.get_replica_context().world_size > 1:
            self.generation.answers = SharedAnswers()
            limits = SharedLimits(partial(serve.get_deployment_actor, LIMITS))
            self.generation.tenants.share(limits)
            self._leaving.callback(limits.close)
        return http_api.build(self.generation, self._template, self.authentication, self._exposition.text)
