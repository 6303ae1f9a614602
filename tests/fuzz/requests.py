"""Requests of both public APIs, most of which are answered."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gateway.api.anthropic.bodies import CountRequest, MessagesRequest
from gateway.api.anthropic.message_api import COUNT_TOKENS
from gateway.api.anthropic.message_api import MESSAGES as CLAUDE
from gateway.api.openai.chat import ChatRequest
from gateway.api.openai.completions import CompletionRequest
from gateway.api.openai.responses import ResponseRequest
from gateway.api.text_api import DETOKENIZE, TOKENIZE, DetokenizeRequest, TokenizeRequest
from protos import generation_pb2
from tests.fuzz.bodies import body_of
from tests.fuzz.calls import DAMAGES, REQUESTS, STAYS, GrpcCall, HttpCall, Leaving
from tests.fuzz.harness import CHAT, COMPLETIONS, RESPONSES
from tests.fuzz.messages import PUBLIC_HINTS, message_of
from tests.fuzz.values import graded
from tests.support.service import MODEL

LEAVING = st.one_of(
    st.builds(Leaving, pieces=st.integers(1, 4)),
    st.builds(Leaving, seconds=st.sampled_from([0.0, 0.02, 0.1])),
)
STAYING = st.sampled_from([True] * 7 + [False]).flatmap(lambda stays: st.just(STAYS) if stays else LEAVING)
DAMAGE = st.sampled_from([None] * 40 + sorted(DAMAGES))
BODIES = {
    COMPLETIONS: body_of(CompletionRequest),
    CHAT: body_of(ChatRequest),
    RESPONSES: body_of(ResponseRequest),
    CLAUDE: body_of(MessagesRequest),
    COUNT_TOKENS: body_of(CountRequest),
    TOKENIZE: body_of(TokenizeRequest),
    DETOKENIZE: body_of(DetokenizeRequest),
}
PAGES = [
    "/health",
    "/loads",
    "/metrics",
    "/ping",
    "/version",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/v1/models/\ud800",
    "/",
    "/page",
    "/docs",
    "/openapi.json",
    "/nowhere",
]
MESSAGES = {
    name: message_of(
        request.DESCRIPTOR, PUBLIC_HINTS, ("text",) if request is generation_pb2.GenerateRequest else ()
    )
    for name, request in REQUESTS.items()
}


def _posts(path: str) -> SearchStrategy[HttpCall]:
    return st.builds(HttpCall, st.just(path), graded(BODIES[path]), DAMAGE, STAYING)


def _calls(method: str) -> SearchStrategy[GrpcCall]:
    return st.builds(GrpcCall, st.just(method), graded(MESSAGES[method]), STAYING)


def requests() -> SearchStrategy[Any]:
    generating = [
        _posts(COMPLETIONS),
        _posts(COMPLETIONS),
        _posts(CHAT),
        _posts(RESPONSES),
        _posts(CLAUDE),
        _calls("Generate"),
        _calls("Complete"),
    ]
    methods = sorted(REQUESTS.keys() - {"Generate", "Complete"})
    asking = [_posts(TOKENIZE), _posts(DETOKENIZE), _posts(COUNT_TOKENS), *map(_calls, methods)]
    looking = st.builds(HttpCall, st.sampled_from(PAGES), st.none())
    several = [*generating * 3, st.one_of(asking), looking]
    return st.sampled_from(range(len(several))).flatmap(several.__getitem__)
