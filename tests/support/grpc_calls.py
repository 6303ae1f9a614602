"""The Generation service without a server."""

from gateway.api.access import Authentication, digest
from gateway.api.grpc_api import GenerationServicer
from gateway.api.openai.rendering import ChatPrompts
from gateway.generation.generation import Generation
from gateway.settings import GatewaySettings
from tests.support.http_calls import TEMPLATE


class Context:
    """Fake gRPC context that records what a handler sets."""

    code = details = None

    def __init__(self, peer="ipv4:127.0.0.1:5000", **metadata):
        self._peer = peer
        self._metadata = metadata
        self.trailing = []

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, trailing_metadata):
        self.trailing = trailing_metadata

    def invocation_metadata(self):
        return self._metadata.items()

    def peer(self):
        return self._peer


def servicer_of(fleet, tokenizer, keys=(), **limits):
    """Returns a servicer with the chat template of ``app_of``. limits: fields of GatewaySettings."""
    servicer = GenerationServicer()
    settings = GatewaySettings(model="m", tokenizer="unused", **limits)
    servicer.generation = Generation(settings, tokenizer, fleet)
    servicer.chat_prompts = ChatPrompts.of(TEMPLATE, servicer.generation)
    servicer.authentication = Authentication(tuple(map(digest, keys)), anonymous=False)
    return servicer
