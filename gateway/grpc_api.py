"""The Generation service of protos/generation.proto."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Protocol

import grpc
from pydantic import ValidationError

from gateway.errors import InvalidRequestError, UnknownModelError, WorkerLostError
from gateway.generation import Chunk, Generation, Request, Usage
from gateway.schemas import MAX_STOPS, first_error
from gateway.settings import Speculation
from protos import generation_pb2
from protos.convert import sampling_from_message, set_fields


class Context(Protocol):
    """The part in use of what Serve's proxy hands over in place of grpc's own context."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...


class GenerationServicer:
    """Named as in the proto: Serve's proxy finds methods by name."""

    generation: Generation

    async def Generate(  # noqa: N802
        self, message: generation_pb2.GenerateRequest, grpc_context: Context
    ) -> AsyncIterator[generation_pb2.GenerateChunk]:
        try:
            prepared = self.generation.prepare(_request(message))
            async with aclosing(self.generation.chunks(prepared)) as chunks:
                async for chunk in chunks:
                    yield _chunk(chunk, prepared.seed)
        except (InvalidRequestError, WorkerLostError) as error:
            _tell(grpc_context, error)
            raise

    async def GetModel(  # noqa: N802
        self, message: generation_pb2.GetModelRequest, grpc_context: Context
    ) -> generation_pb2.Model:
        try:
            max_length = self.generation.max_length()
        except WorkerLostError as error:
            _tell(grpc_context, error)
            raise
        return generation_pb2.Model(
            id=self.generation.settings.model,
            vocab_size=self.generation.vocab_size,
            max_length=max_length,
            workers=[
                generation_pb2.Worker(
                    role=worker.role,
                    model=worker.model,
                    address=worker.address,
                    pid=worker.pid,
                    node=worker.node,
                )
                for worker in self.generation.fleet.workers()
            ],
        )


def _tell(context: Context, error: InvalidRequestError | WorkerLostError) -> None:
    """Without this the client would be sent the traceback as INTERNAL."""
    context.set_code(_code(error))
    context.set_details(str(error))


def _code(error: InvalidRequestError | WorkerLostError) -> grpc.StatusCode:
    if isinstance(error, UnknownModelError):
        return grpc.StatusCode.NOT_FOUND
    if isinstance(error, InvalidRequestError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.UNAVAILABLE


def _request(message: generation_pb2.GenerateRequest) -> Request:
    """Raises InvalidRequestError naming the field."""
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequestError("stop", f"{len(message.stop)} strings, at most {MAX_STOPS} are accepted")
    tokens = message.WhichOneof("prompt") == "tokens"
    try:
        return Request(
            prompt=tuple(message.tokens.ids) if tokens else message.text,
            sampling=sampling_from_message(message.sampling),
            stop=tuple(message.stop),
            speculation=Speculation.model_validate(set_fields(message.speculation)),
        )
    except ValidationError as error:
        raise InvalidRequestError(*first_error(error.errors())) from error


def _chunk(chunk: Chunk, seed: int) -> generation_pb2.GenerateChunk:
    return generation_pb2.GenerateChunk(
        token_ids=chunk.token_ids,
        text=chunk.text,
        finish_reason=chunk.finish_reason,
        usage=None if chunk.usage is None else _usage(chunk.usage, seed),
    )


def _usage(usage: Usage, seed: int) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        speculation=generation_pb2.Speculation(
            mode=usage.speculation.mode, drafter=usage.speculation.drafter, seed=seed, **asdict(usage.record)
        ),
    )
