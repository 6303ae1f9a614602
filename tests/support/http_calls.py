"""OpenAI's HTTP API without a server, over workers with scripted answers."""

from contextlib import asynccontextmanager
from typing import Any

import httpx

from gateway.api import http_api
from gateway.api.access import Authentication, digest
from gateway.api.openai.chat_template import ChatTemplate
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from tests.fakes.scripted import fleet_of

TEXT = "The cat sät on the mat."
ANSWER = list(TEXT.encode())
ASK = {"prompt": "x", "max_tokens": len(ANSWER)}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": len(ANSWER)}
TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with a user') }}{% endif %}",
    {},
)


@asynccontextmanager
async def app_of(tokenizer, *workers, template=TEMPLATE, keys=(), defaults=None, store=None, **limits):
    """Yields the app. defaults: default sampling. store: adapter store. limits: fields of GatewaySettings."""
    settings = GatewaySettings(model="m", tokenizer="unused", **limits)
    authentication = Authentication(tuple(map(digest, keys)), anonymous=False)
    async with fleet_of(*workers) as fleet:
        generation = Generation(settings, tokenizer, fleet, defaults or {}, store)
        yield http_api.build(generation, template, authentication)


@asynccontextmanager
async def client_of(tokenizer, *workers, host="127.0.0.1", **given):
    """Yields a client of an app. host: address of the client. given: arguments of ``app_of``."""
    async with app_of(tokenizer, *workers, **given) as app:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client


def events_of(response):
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]


def bearer(key: str) -> dict[str, str]:
    """Returns the header of a caller with an API key."""
    return {"Authorization": f"Bearer {key}"}
