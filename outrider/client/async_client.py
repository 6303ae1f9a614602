"""Client of the gRPC API for asyncio programs."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Unpack

import grpc

from outrider.client.answer import AnswerPiece, AnswerSoFar
from outrider.client.client import CLOSED
from outrider.client.errors import OutriderError
from outrider.client.fields import GenerateFields, MessageFields, chat_request, prompt_request
from protos import generation_pb2, generation_pb2_grpc


class AsyncAnswer(AnswerSoFar):
    """Answer whose request is sent when ``async for`` iterates it; otherwise like ``Answer``."""

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """Yields the pieces. Raises OutriderError if a repetition cannot help, or has not helped in time."""
        reading = self.reading()
        while True:
            for piece in reading.kept():
                yield piece
            if reading.is_over:
                return
            call = self._open_call(reading.begin())
            try:
                async for chunk in call:
                    reading.take(chunk)
                    for piece in reading.kept():
                        yield piece
            except grpc.RpcError as error:
                await asyncio.sleep(reading.pause_s(error, time.monotonic()))
            finally:
                call.cancel()

    async def read(self) -> str:
        """Returns the whole text. Raises OutriderError like an iteration."""
        async for _ in self:
            pass
        return self.text


class AsyncClient:
    """Client of a gateway, or of a proxy in front of several, for one event loop."""

    def __init__(self, address: str, api_key: str | None = None, patience_s: float = 60.0) -> None:
        """Takes the arguments of ``Client``. The channel is opened when the first answer is read."""
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._patience_s = patience_s
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False

    def generate(self, prompt: str | Sequence[int], **fields: Unpack[GenerateFields]) -> AsyncAnswer:
        """Returns the answer that continues a text or token ids. Raises BadRequestError for a wrong field."""
        return AsyncAnswer(self._call, prompt_request(prompt, fields), self._patience_s)

    def chat(self, messages: Sequence[MessageFields], **fields: Unpack[GenerateFields]) -> AsyncAnswer:
        """Returns the answer to the last message of a chat. Raises BadRequestError for a wrong field."""
        return AsyncAnswer(self._call, chat_request(messages, fields), self._patience_s)

    async def close(self) -> None:
        """Closes the channel; unfinished answers end with an error."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close(None)

    def _call(self, request: generation_pb2.GenerateRequest) -> Any:
        if self._is_closed:
            raise OutriderError(CLOSED)
        if self._channel is None:  # a channel belongs to the event loop in which it is created
            self._channel = grpc.aio.insecure_channel(self._address)
        stub: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]
        return stub.Generate(request, metadata=self._metadata)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
