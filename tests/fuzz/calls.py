"""Calls of the public APIs as data: what is sent, when the caller loses interest, and how it ended."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from fastapi import FastAPI

from protos import generation_pb2, generation_pb2_grpc
from tests.fuzz.bodies import encoded
from tests.support.service import Service

DAMAGES = {
    "cut": lambda body: body[: len(body) // 2],
    "twice": lambda body: body + body,
    "utf-16": lambda body: body.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"),
    "not utf-8": lambda body: b"\xff" + body,
    "byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "nothing": lambda body: b"",
}
ANSWERED, LEFT = "answered", "left"  # further results are the codes of refusals
OUR_FAULT = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
)


@dataclass(frozen=True)
class Leaving:
    """When a caller hangs up: after a number of pieces of the answer, or of seconds."""

    pieces: int | None = None
    seconds: float | None = None


STAYS = Leaving()


@dataclass(frozen=True)
class HttpCall:
    path: str
    body: Any  # plain values and Literals; None asks with GET
    damage: str | None = None  # done to the bytes
    leaving: Leaving = STAYS

    async def run(self, service: Service) -> str:
        """Raises AssertionError for an answer that no caller should see."""
        raw = b"" if self.body is None else encoded(self.body).encode("utf-8", "surrogatepass")
        raw = raw if self.damage is None else DAMAGES[self.damage](raw)
        exchange = Exchange("GET" if self.body is None else "POST", self.path, raw, self.leaving)
        try:
            answer = await exchange.run(service.app)
        except Exception as error:
            raise AssertionError(f"500: {error!r}") from error
        if answer is None:
            return LEFT
        status, content = answer
        assert status < 500, f"{status}: {content[:500]!r}"
        if status < 400:
            _read(content)
            return ANSWERED
        refusal = _json(content)["error"]
        assert refusal["message"], content
        return str(status)


def _read(content: bytes) -> None:
    """An answer that began with 200 also ends well, and all of it is JSON."""
    if content.startswith(b"event: "):
        for event in content.decode().removesuffix("\n\n").split("\n\n"):
            told = _json(event.partition("\ndata: ")[2])
            assert told["type"] != "response.failed", f"refused in the middle of an answer: {told}"
        return
    if not content.startswith(b"data: "):
        if content and not content.lstrip().startswith(b"<"):  # a page
            _json(content)
        return
    events = content.decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]", content[-200:]
    for event in events:
        told = _json(event.removeprefix("data: "))
        assert "error" not in told, f"refused in the middle of an answer: {told}"


def _json(content: bytes | str) -> Any:
    return json.loads(content, parse_constant=_no_number)


def _no_number(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


@dataclass
class Exchange:
    """HTTP exchange as a server hands it to an app: unlike httpx's it can be broken off."""

    method: str
    path: str
    body: bytes
    leaving: Leaving

    def __post_init__(self) -> None:
        self._is_asked = False
        self._left = asyncio.Event()
        self._status = 0
        self._pieces: list[bytes] = []

    async def run(self, app: FastAPI) -> tuple[int, bytes] | None:
        """Status and content; None if the caller left before the end."""
        path = self.path.encode("utf-8", "surrogatepass")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"service"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("service", 80),
        }
        try:
            async with asyncio.timeout(self.leaving.seconds):
                await app(scope, self._receive, self._send)
        except TimeoutError:
            if self.leaving.seconds is None:
                raise
            return None
        return None if self._left.is_set() else (self._status, b"".join(self._pieces))

    async def _receive(self) -> dict[str, Any]:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if message.get("body"):
            self._pieces.append(message["body"])
        if message.get("more_body") and len(self._pieces) == self.leaving.pieces:
            self._left.set()


REQUESTS = {
    method.name: getattr(generation_pb2, method.input_type.name)
    for method in generation_pb2.DESCRIPTOR.services_by_name["Generation"].methods
}


@dataclass(frozen=True)
class GrpcCall:
    method: str
    message: Mapping[str, Any]
    leaving: Leaving = STAYS

    async def run(self, service: Service) -> str:
        """Raises AssertionError for a status that no caller should see."""
        stub = generation_pb2_grpc.GenerationStub(service.channel)
        call = getattr(stub, self.method)(REQUESTS[self.method](**self.message))
        try:
            async with asyncio.timeout(self.leaving.seconds):
                if not hasattr(call, "read"):
                    await call
                    return ANSWERED
                pieces = 0
                async for _ in call:
                    pieces += 1
                    if pieces == self.leaving.pieces:
                        return LEFT
                return ANSWERED
        except TimeoutError:
            return LEFT
        except grpc.aio.AioRpcError as error:
            refusal = error
        finally:
            call.cancel()
        code, details = refusal.code(), refusal.details()
        assert code not in OUR_FAULT, f"{code.name}: {details}"
        assert details, code
        return str(code.name)
