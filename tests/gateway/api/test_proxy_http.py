"""Endless heads of HTTP requests, at a proxy that is started as Serve starts it."""

import asyncio
import socket
import warnings
from contextlib import asynccontextmanager

import pytest
import uvicorn.config

from tests.support.patience import LIMIT_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray Serve's own use of pydantic is deprecated
    from ray.serve._private.grpc_util import start_grpc_server
    from ray.serve._private.http_util import start_asgi_http_server
    from ray.serve.config import HTTPOptions, gRPCOptions

from gateway.api.proxy_http import MAX_HEAD_BYTES

PIECE = b"a" * 2**14
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"
ENDLESS = {
    "request line": b"GET /",
    "header's name": HEAD + b"X",
    "header's value": HEAD + b"X-A: ",
    "chunk's extension": CHUNKED + b"2;",
    "trailer": CHUNKED + b"0\r\nX-A: ",
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def length(scope, receive, send):
    """Application that answers with the length of the body."""
    count, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        count, more = count + len(message["body"]), message.get("more_body", False)
    told = str(count).encode()
    headers = [(b"connection", b"close"), (b"content-length", str(len(told)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": told})


@asynccontextmanager
async def proxy(monkeypatch):
    """Port of Serve's HTTP server, begun with the gRPC server in the order of Serve's proxy."""
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", "uvicorn.protocols.http.auto:AutoHTTPProtocol")
    loop, port = asyncio.get_running_loop(), free_port()
    http_options = HTTPOptions(host="127.0.0.1", port=port)
    grpc_options = gRPCOptions(
        port=free_port(), grpc_servicer_functions=["gateway.api.proxy.add_generation_servicer"]
    )
    starting = loop.create_task(start_asgi_http_server(length, http_options, event_loop=loop))
    beside = loop.create_task(start_grpc_server(lambda **_: None, grpc_options, event_loop=loop))
    (serving, server), (_, grpc_server) = await starting, await beside
    try:
        yield port
    finally:
        server.should_exit = True
        await grpc_server.stop(None)
        await serving


async def send(port, begin, pieces):
    """Returns the answer of the proxy, and the number of pieces that it read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    taken = 0
    try:
        writer.write(begin)
        for piece in pieces:
            await writer.drain()
            if reader.at_eof() or writer.transport.is_closing():
                break
            writer.write(piece)
            taken += 1
            await asyncio.sleep(0)
        return await reader.read(), taken
    except ConnectionError:
        return b"", taken
    finally:
        writer.close()


@pytest.mark.parametrize("begin", ENDLESS.values(), ids=ENDLESS)
async def test_head_without_an_end_is_cut_off_and_others_are_answered(monkeypatch, begin):
    most = 512  # pieces, 8 MiB
    async with proxy(monkeypatch) as port, asyncio.timeout(LIMIT_S):
        _, taken = await send(port, begin, [PIECE] * most)
        assert taken < most
        answer, _ = await send(port, HEAD + b"Content-Length: 2\r\n\r\nab", [])
        assert answer.endswith(b"\r\n\r\n2")


async def test_head_below_the_bound_and_a_long_body_pass(monkeypatch):
    body = [PIECE] * 64
    head = HEAD + b"X-A: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    async with proxy(monkeypatch) as port, asyncio.timeout(LIMIT_S):
        announced = head + f"Content-Length: {len(body) * len(PIECE)}\r\n\r\n".encode()
        answer, _ = await send(port, announced, body)
        assert answer.endswith(f"\r\n\r\n{len(body) * len(PIECE)}".encode())
        chunk = f"{len(PIECE):x}\r\n".encode() + PIECE + b"\r\n"
        answer, _ = await send(
            port, head + b"Transfer-Encoding: chunked\r\n\r\n", [chunk] * 64 + [b"0\r\n\r\n"]
        )
        assert answer.endswith(f"\r\n\r\n{len(body) * len(PIECE)}".encode())
