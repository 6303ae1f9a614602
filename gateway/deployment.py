"""The gateway as a Serve deployment: both APIs over one Generation."""

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
    """Returns the name of the deployment that holds the draft of that name."""
    return f"draft-{name}"


def _handle_of(name: str) -> Any:
    """Returns the handle of a draft that is its own application, which may be there or come later."""
    from ray.serve.handle import DeploymentHandle  # takes a second, and is for replicas only

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
            start_tracing: starts tracing in this process and returns what ends it.
            pace: settings of the start, in force until Serve hands over later settings.
        """
        show_debug_lines()
        bound_heads()  # with HAProxy in front, Serve reads HTTP in this process
        shorten_refusals()
        self._leaving = AsyncExitStack()  # ends what was started, the newest first
        self._leaving.callback(start_tracing())
        # Serve fills the table of a handle's workers from the moment that the handle is set up.
        self._handles = [handle.options() for handle in worker_handles]
        self._joined: dict[str, Any] = {}  # handles of drafts that came later
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
        """Takes up the live settings that Serve hands over at start and whenever ``user_config`` changes.

        The pace applies to requests under way too. Serve ends a replica whose ``reconfigure`` raises, and
        each replica that it starts instead. So refused settings are logged and shown by /health, and the
        earlier settings stay in force.
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
        """Refuses new requests, and returns how many were under way once those have ended or been ended.

        ``cluster/stop.py`` calls this on every gateway before it shuts Serve down.
        """
        return await self.generation.leave(within_s)

    async def __del__(self) -> None:
        """Serve awaits it before the replica ends."""
        await self._leaving.aclose()

    def __serve_build_asgi_app__(self) -> FastAPI:
        from ray import serve  # takes a second, and is for replicas only

        if serve.get_replica_context().world_size > 1:
            self.generation.answers = SharedAnswers()
            limits = SharedLimits(partial(serve.get_deployment_actor, LIMITS))
            self.generation.tenants.share(limits)
            self._leaving.callback(limits.close)
        return http_api.build(self.generation, self._template, self.authentication, self._exposition.text)
