"""Client of the gRPC API that finishes its answers even if gateways are lost."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import grpc

from outrider.client.answer import AnswerPiece, AnswerSoFar
from outrider.client.errors import OutriderError, error_of
from outrider.client.fields import GenerateFields, MessageFields, chat_request, prompt_request
from protos import generation_pb2, generation_pb2_grpc

CLOSED = "the client is closed"
CALL_S = 10.0  # timeout in seconds of a call that generates nothing


class Answer(AnswerSoFar):
    """Answer whose request is sent when it is iterated.

    Each iteration yields all pieces from the first piece on. Leaving an iteration cancels the request. The
    next iteration then repeats the request with the same seed, to receive the missing pieces.
    """

    def __iter__(self) -> Iterator[AnswerPiece]:
        """Yields the pieces. Raises OutriderError if a repetition cannot help, or has not helped in time."""
        reading = self.reading()
        while True:
            yield from reading.kept()
            if reading.is_over:
                return
            call = self._open_call(reading.begin())
            try:
                for chunk in call:
                    reading.take(chunk)
                    yield from reading.kept()
            except grpc.RpcError as error:
                time.sleep(reading.pause_s(error, time.monotonic()))
            finally:
                call.cancel()

    def read(self) -> str:
        """Returns the whole text. Raises OutriderError like an iteration."""
        for _ in self:
            pass
        return self.text


class Client:
    """Client of a gateway, or of a proxy in front of several."""

    def __init__(self, address: str, api_key: str | None = None, patience_s: float = 60.0) -> None:
        """Opens a channel.

        Args:
            address: host:port.
            patience_s: seconds of failed attempts without a new token, after which an answer is given up.
        """
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._patience_s = patience_s
        self._is_closed = False

    def generate(self, prompt: str | Sequence[int], **fields: Unpack[GenerateFields]) -> Answer:
        """Returns the answer that continues a text or token ids. Raises BadRequestError for a wrong field."""
        return Answer(self._call, prompt_request(prompt, fields), self._patience_s)

    def chat(self, messages: Sequence[MessageFields], **fields: Unpack[GenerateFields]) -> Answer:
        """Returns the answer to the last message of a chat. Raises BadRequestError for a wrong field."""
        return Answer(self._call, chat_request(messages, fields), self._patience_s)

    def loads(self) -> generation_pb2.Loads:
        """Returns the load of the answering gateway, and of the workers. Raises OutriderError."""
        self._check_open()
        try:
            loads: generation_pb2.Loads = self._stub.GetLoads(
                generation_pb2.GetLoadsRequest(), metadata=self._metadata, timeout=CALL_S
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return loads

    def close(self) -> None:
        """Closes the channel; unfinished answers end with an error."""
        self._is_closed = True
        self._channel.close()

    def _call(self, request: generation_pb2.GenerateRequest) -> Any:
        self._check_open()
        return self._stub.Generate(request, metadata=self._metadata)

    def _check_open(self) -> None:
        if self._is_closed:
            raise OutriderError(CLOSED)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
