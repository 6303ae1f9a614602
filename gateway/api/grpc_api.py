"""gRPC service Generation of protos/generation.proto."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from opentelemetry.trace import Span, use_span
from pydantic import ValidationError

from gateway.api.access import Authentication, peer_host
from gateway.api.grpc_chat import in_chat
from gateway.api.grpc_health import HealthMethods
from gateway.api.openai.rendering import ChatPrompts
from gateway.api.openai.schemas import MAX_BIASES, MAX_STOP_LENGTH, MAX_STOPS, PRIORITIES, invalid
from gateway.api.round_message import round_message
from gateway.errors import DEFECT, GatewayError, InvalidRequestError, OverloadedError
from gateway.generation.form import Form, choice, json_object, json_schema
from gateway.generation.request import AnswerUsage, Chunk, Prepared, Prompt, Request
from gateway.generation.tracing import served, untraced
from gateway.observe.loads import counters, loads
from gateway.sequence import Origin, Token
from gateway.settings import Speculation
from outrider.telemetry.counters import IN_EVERY_ANSWER
from protos import generation_pb2
from protos.conversions import sampling_from_message, set_fields

RETRY_DELAY = "retry-after-ms"  # trailing metadata of RESOURCE_EXHAUSTED
ORIGINS = {origin: generation_pb2.Origin.Value(f"ORIGIN_{origin.name}") for origin in Origin}
SERVICE = "outrider.v1.Generation"
RPC = {"rpc.system": "grpc", "rpc.service": SERVICE}
TRACED = ("Generate", "Complete")  # methods that generate; other spans would only clutter the traces
REQUEST_FIELDS = ("n", "task", "model")
INTEGER = re.compile(r"-?[0-9]{1,18}")

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT")


class Context(Protocol):
    """Methods of the call's context that are used here; Serve's proxy passes its own kind of context."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...
    def invocation_metadata(self) -> Iterable[tuple[str, str]]: ...
    def peer(self) -> str: ...


Method = Callable[["GenerationServicer", RequestT, Context], Awaitable[ReplyT]]
StreamMethod = Callable[["GenerationServicer", RequestT, Context], Awaitable[AsyncIterator[ReplyT]]]
ServedStream = Callable[["GenerationServicer", RequestT, Context], AsyncIterator[ReplyT]]


def guarded(method: Method[RequestT, ReplyT]) -> Method[RequestT, ReplyT]:
    """Refuses callers without access, and turns errors of the method into status codes."""

    @wraps(method)
    async def guard(self: "GenerationServicer", message: RequestT, grpc_context: Context) -> ReplyT:
        with _call(self, method.__name__, message, grpc_context) as span, _current(span):
            return await method(self, message, grpc_context)

    return guard


def guarded_stream(method: StreamMethod[RequestT, ReplyT]) -> ServedStream[RequestT, ReplyT]:
    """Guards a method that streams its replies, as ``guarded`` does for a single reply."""

    @wraps(method)
    async def guard(
        self: "GenerationServicer", message: RequestT, grpc_context: Context
    ) -> AsyncIterator[ReplyT]:
        with _call(self, method.__name__, message, grpc_context) as span:
            with _current(span):
                replies: Any = await method(self, message, grpc_context)
            async with aclosing(replies):
                async for reply in replies:
                    yield reply

    return guard


@contextmanager
def _call(servicer: "GenerationServicer", method: str, message: Message, context: Context) -> Iterator[Span]:
    """Traces and admits a call, and sets its status if it fails; Serve would send a traceback as INTERNAL."""
    with _span(method, context) as span:
        try:
            servicer.admit(message, context)
            yield span
        except GatewayError as error:
            _set_status(context, span, error.grpc_status, str(error))
            if isinstance(error, OverloadedError):
                context.set_trailing_metadata([(RETRY_DELAY, str(round(error.retry_after_s * 1e3)))])
            raise
        except Exception:  # the log has the traceback, which may contain a prompt
            _set_status(context, span, grpc.StatusCode.INTERNAL, DEFECT)
            raise


def _current(span: Span) -> AbstractContextManager[Span]:
    return use_span(span, record_exception=False, set_status_on_exception=False)


def _span(method: str, context: Context) -> AbstractContextManager[Span]:
    if method not in TRACED:
        return untraced()
    traceparent = dict(context.invocation_metadata()).get("traceparent", "")
    return served(f"{SERVICE}/{method}", traceparent, {**RPC, "rpc.method": method})


def _set_status(context: Context, span: Span, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)
    span.set_attribute("rpc.grpc.status_code", code.value[0])


class GenerationServicer(HealthMethods):
    """Methods of the service, named as in the proto: Serve's proxy finds them by name."""

    authentication: Authentication
    chat_prompts: ChatPrompts

    def admit(self, message: Message, context: Context) -> None:
        """Checks the caller and the message's length. Raises UnauthenticatedError or InvalidRequestError."""
        self._caller(context)
        limit = self.generation.settings.max_message_bytes
        if message.ByteSize() > limit:
            raise InvalidRequestError("request", f"{message.ByteSize()} bytes, at most {limit} are accepted")

    def _caller(self, context: Context) -> str | None:
        """Returns the caller's name. Raises UnauthenticatedError as ``Authentication.check`` does."""
        metadata = dict(context.invocation_metadata())
        return self.authentication.check(metadata.get("authorization"), peer_host(context.peer()))

    async def _prepared(self, message: generation_pb2.GenerateRequest, context: Context) -> Prepared:
        deadline = self.generation.deadline()
        async with self.generation.preparations.permit(deadline):
            request, caller = _request(message), self._caller(context)
            if not message.HasField("chat"):
                return await self.generation.prepare(request, caller, deadline)
            try:
                request = await in_chat(request, message.chat, self.chat_prompts, self.generation)
                return await self.generation.prepare(request, caller, deadline)
            except InvalidRequestError as error:
                field = "messages" if error.field == "prompt" else error.field
                raise type(error)(field, error.message) from error

    @guarded_stream
    async def Generate(  # noqa: N802
        self, message: generation_pb2.GenerateRequest, grpc_context: Context
    ) -> AsyncIterator[generation_pb2.GenerateChunk]:
        prepared = await self._prepared(message, grpc_context)
        return self._chunks(prepared, message.include_rounds)

    async def _chunks(
        self, prepared: Prepared, include_rounds: bool
    ) -> AsyncIterator[generation_pb2.GenerateChunk]:
        seed: int | None = prepared.seed
        async with aclosing(self.generation.chunks(prepared)) as chunks:
            async for chunk in chunks:
                reply = _chunk(chunk, prepared.seed, seed)
                if include_rounds and chunk.round is not None:
                    reply.round.CopyFrom(round_message(chunk.round))
                yield reply
                seed = None

    @guarded
    async def Complete(  # noqa: N802
        self, message: generation_pb2.GenerateRequest, grpc_context: Context
    ) -> generation_pb2.Completion:
        prepared = await self._prepared(message, grpc_context)
        choices = [generation_pb2.Choice(index=index) for index in range(len(prepared.sequences))]
        completion = generation_pb2.Completion(choices=choices)
        async with aclosing(self.generation.chunks(prepared)) as chunks:
            async for chunk in chunks:
                choice = completion.choices[chunk.choice]
                choice.MergeFrom(
                    generation_pb2.Choice(
                        **_tokens(chunk.tokens),
                        text=choice.text + chunk.text,
                        finish_reason=chunk.finish_reason,
                        receipt=_receipt(chunk),
                    )
                )
                if chunk.usage is not None:
                    completion.usage.CopyFrom(_usage(chunk.usage, prepared.seed))
        return completion

    @guarded
    async def Tokenize(  # noqa: N802
        self, message: generation_pb2.TokenizeRequest, grpc_context: Context
    ) -> generation_pb2.Tokens:
        async with self.generation.preparations.permit(self.generation.deadline()):
            self.generation.limits.check_text("text", message.text)
            encoding = await self.generation.tokenization.encode(message.text, add_special_tokens=False)
        return generation_pb2.Tokens(ids=encoding.ids, pieces=encoding.tokens)

    @guarded
    async def Detokenize(  # noqa: N802
        self, message: generation_pb2.DetokenizeRequest, grpc_context: Context
    ) -> generation_pb2.Text:
        async with self.generation.preparations.permit(self.generation.deadline()):
            self.generation.limits.check_length("ids", message.ids)
            self.generation.limits.check_ids("ids", message.ids)
            text = await self.generation.tokenization.decode(message.ids, skip_special_tokens=False)
        return generation_pb2.Text(text=text)

    @guarded
    async def GetModel(  # noqa: N802
        self, message: generation_pb2.GetModelRequest, grpc_context: Context
    ) -> generation_pb2.Model:
        generation = self.generation
        workers = [
            generation_pb2.WorkerInfo(
                role=worker.role,
                model=worker.model,
                address=worker.address,
                pid=worker.pid,
                node=worker.node,
            )
            for worker in generation.fleet.workers()
        ]
        return generation_pb2.Model(
            id=generation.settings.model,
            vocab_size=generation.limits.vocab_size,
            max_length=generation.limits.max_length(),
            workers=workers,
            adapters=await generation.adapters.served(),
        )

    @guarded
    async def GetLoads(  # noqa: N802
        self, message: generation_pb2.GetLoadsRequest, grpc_context: Context
    ) -> generation_pb2.Loads:
        return loads(self.generation)


def _request(message: generation_pb2.GenerateRequest) -> Request:
    """Returns the request of a message, without its chat. Raises InvalidRequestError, naming the field."""
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequestError("stop", f"{len(message.stop)} strings, at most {MAX_STOPS} are accepted")
    if any(len(stop) > MAX_STOP_LENGTH for stop in message.stop):
        raise InvalidRequestError("stop", f"at most {MAX_STOP_LENGTH} characters are accepted in one")
    biases = len(message.sampling.logit_bias)
    if biases > MAX_BIASES:
        raise InvalidRequestError("logit_bias", f"{biases} entries, at most {MAX_BIASES} are accepted")
    if message.sampling.HasField("verification"):
        raise InvalidRequestError("sampling.verification", "is not a caller's: set speculation.verification")
    if message.sampling.HasField("grammar"):
        raise InvalidRequestError("sampling.grammar", "is not a caller's: set structured_outputs")
    tokens, predicted = message.WhichOneof("prompt") == "tokens", message.WhichOneof("prediction")
    prediction: Prompt | None = None
    if predicted == "predicted_text":
        prediction = message.predicted_text
    elif predicted == "predicted_tokens":
        prediction = tuple(message.predicted_tokens.ids)
    own = {name: getattr(message, name) for name in REQUEST_FIELDS if message.HasField(name)}
    try:
        return Request(
            prompts=(tuple(message.tokens.ids) if tokens else message.text,),
            sampling=sampling_from_message(message.sampling),
            stop=tuple(message.stop),
            speculation=Speculation.model_validate(set_fields(message.speculation)),
            form=_form(message.structured_outputs) if message.HasField("structured_outputs") else None,
            prediction=prediction,
            receipt=message.receipt,
            draft_from=message.draft_from if predicted == "draft_from" else None,
            **_place_in_queue(message.priority),
            **own,
        )
    except ValidationError as error:
        raise invalid(error) from error


def _place_in_queue(priority: str) -> dict[str, Any]:
    """Returns the fields of a request that place it in the queue. Raises InvalidRequestError."""
    if not priority:
        return {}
    if priority in ("interactive", "batch"):
        return {"priority": priority}
    if not INTEGER.fullmatch(priority):
        raise InvalidRequestError("priority", PRIORITIES)
    return {"order": int(priority)}


def _form(message: generation_pb2.StructuredOutputs) -> Form:
    """Returns the form that an answer must have. Raises InvalidRequestError, naming the field."""
    field = message.WhichOneof("form")
    if field is None or (field == "json_object" and not message.json_object):
        raise InvalidRequestError("structured_outputs", "needs one of its fields")
    named = f"structured_outputs.{field}"
    match field:
        case "json_object":
            return json_object(named)
        case "json":
            return json_schema(message.json, named)
        case "regex":
            return Form("regex", message.regex, named)
        case "choice":
            return choice(list(message.choice.texts), named)
    return Form("lark", message.grammar, named)


def _chunk(chunk: Chunk, seed: int, reported_seed: int | None) -> generation_pb2.GenerateChunk:
    return generation_pb2.GenerateChunk(
        choice=chunk.choice,
        **_tokens(chunk.tokens),
        text=chunk.text,
        text_lengths=[len(piece.text) for piece in chunk.pieces],
        finish_reason=chunk.finish_reason,
        usage=None if chunk.usage is None else _usage(chunk.usage, seed),
        seed=reported_seed,
        receipt=_receipt(chunk),
    )


def _receipt(chunk: Chunk) -> str | None:
    return None if chunk.receipt is None else json.dumps(chunk.receipt)


def _tokens(tokens: tuple[Token, ...]) -> dict[str, Any]:
    return {
        "token_ids": [token.id for token in tokens],
        "origins": [ORIGINS[token.origin] for token in tokens],
        "logprobs": [token.logprobs for token in tokens if token.logprobs is not None],
    }


def _usage(usage: AnswerUsage, seed: int) -> generation_pb2.Usage:
    stats, asked = usage.stats, usage.speculation
    if asked.report:
        speculation = counters(stats, generation_pb2.SpeculationCounts)
        speculation |= {"mode": asked.mode, "drafter": asked.drafter}
    else:
        speculation = {counter.name: getattr(stats, counter.name) for counter in IN_EVERY_ANSWER}
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        speculation=generation_pb2.SpeculationCounts(seed=seed, **speculation),
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
        cached_tokens=usage.cached_tokens,
    )
