"""Types of the request and the response of each path of the HTTP API."""

from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from gateway.api.adapter_api import LOAD_ADAPTER, UNLOAD_ADAPTER, LoadAdapterRequest, UnloadAdapterRequest
from gateway.api.anthropic.bodies import CountRequest, MessagesRequest
from gateway.api.anthropic.message_api import COUNT_TOKENS, MESSAGES
from gateway.api.anthropic.types import AnsweredMessage, CountedTokens, MessageError, MessageEvent
from gateway.api.openai.answer_types import ChatCompletion, ChatEvent, Completion, CompletionEvent, Error
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from gateway.api.openai.response_api import CANCEL, ITEMS, RESPONSE, RESPONSES
from gateway.api.openai.response_types import DeletedResponse, Response, ResponseEvent, ResponseItems
from gateway.api.openai.responses import ResponseRequest
from gateway.api.service_types import Detokenized, Health, Loads, Model, Models, Tokenized, Version
from gateway.api.text_api import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

KEYED = (401,)
READ = (400, 401, 404, 408, 413, 429, 504)  # statuses of endpoints that read a body
GENERATED = (*READ, 500, 503)
FOUND = (401, 404)


@dataclass(frozen=True)
class Endpoint:
    answer: Any  # type of its body; None: no body
    request: type[BaseModel] | None = None
    events: Any = None  # type of each server-sent event; None: never streamed
    refusals: tuple[int, ...] = ()  # statuses with the body of an error
    unready: bool = False  # whether the answer has status 503 while no target is ready
    error: Any = Error  # type of the body of an error


ENDPOINTS: Final = {
    COMPLETIONS: Endpoint(Completion, CompletionRequest, CompletionEvent | Error, GENERATED),
    CHATS: Endpoint(ChatCompletion, ChatRequest, ChatEvent | Error, GENERATED),
    RESPONSES: Endpoint(Response, ResponseRequest, ResponseEvent, GENERATED),
    RESPONSE: Endpoint(Response, refusals=FOUND),
    f"DELETE {RESPONSE}": Endpoint(DeletedResponse, refusals=FOUND),
    ITEMS: Endpoint(ResponseItems, refusals=FOUND),
    CANCEL: Endpoint(None, refusals=(400, *FOUND)),
    MESSAGES: Endpoint(AnsweredMessage, MessagesRequest, MessageEvent, GENERATED, error=MessageError),
    COUNT_TOKENS: Endpoint(CountedTokens, CountRequest, refusals=(*READ, 503), error=MessageError),
    "/v1/models": Endpoint(Models, refusals=KEYED),
    "/v1/models/{name}": Endpoint(Model, refusals=(*KEYED, 404)),
    "/health": Endpoint(Health, unready=True),
    "/loads": Endpoint(Loads, refusals=KEYED),
    "/metrics": Endpoint(str, refusals=KEYED),
    TOKENIZE: Endpoint(Tokenized, TokenizeRequest, refusals=(*READ, 503)),
    DETOKENIZE: Endpoint(Detokenized, DetokenizeRequest, refusals=(*READ, 503)),
    LOAD_ADAPTER: Endpoint(str, LoadAdapterRequest, refusals=(*READ, 403, 503)),
    UNLOAD_ADAPTER: Endpoint(str, UnloadAdapterRequest, refusals=(*READ, 403, 503)),
    "/version": Endpoint(Version),
    "/ping": Endpoint(None, unready=True),
}
