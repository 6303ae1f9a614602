"""Gateway and workers prove themselves to each other; every other caller is refused."""

from collections.abc import AsyncIterator

import grpc
import pytest
from pydantic import ValidationError

from protos import rounds_pb2, rounds_pb2_grpc
from protos.trust import Trust
from tests.fakes.authority import TOKEN, Authority, pem
from tests.support.patience import LIMIT_S


class Echo(rounds_pb2_grpc.TargetWorkerServicer):
    async def Stream(self, requests, context) -> AsyncIterator[rounds_pb2.TargetReplies]:  # noqa: N802
        async for _ in requests:
            yield rounds_pb2.TargetReplies(replies=[rounds_pb2.TargetReply(round=7)])

    async def LoadAdapter(self, adapter, context) -> rounds_pb2.Adapter:  # noqa: N802
        return adapter


async def ask(server_trust: Trust, client_trust: Trust) -> int:
    """Returns the round of the reply. Raises as the call does."""
    server = grpc.aio.server(interceptors=[server_trust.guard()])
    rounds_pb2_grpc.add_TargetWorkerServicer_to_server(Echo(), server)
    port = server_trust.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        async with client_trust.connect(f"127.0.0.1:{port}", ()) as channel:
            call = rounds_pb2_grpc.TargetWorkerStub(channel).Stream(
                iter([rounds_pb2.TargetWorkerRequests()]), metadata=client_trust.metadata, timeout=LIMIT_S
            )
            return (await call.read()).replies[0].round
    finally:
        await server.stop(None)


async def test_trust_token_is_accepted():
    assert await ask(Trust(token=TOKEN), Trust(token=TOKEN)) == 7


async def test_trust_wrong_token_is_refused():
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(Trust(token=TOKEN), Trust(token="x" * len(TOKEN)))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_trust_missing_token_is_refused():
    server = Trust(token=TOKEN)
    nameless = Trust.model_construct(token="")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(server, nameless)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("metadata", "code"),
    [(Trust(token=TOKEN).metadata, grpc.StatusCode.OK), ((), grpc.StatusCode.UNAUTHENTICATED)],
    ids=["token", "no token"],
)
async def test_trust_call_without_a_stream_needs_the_token_too(metadata, code):
    """Loading an adapter reads the worker's disk."""
    server = grpc.aio.server(interceptors=[Trust(token=TOKEN).guard()])
    rounds_pb2_grpc.add_TargetWorkerServicer_to_server(Echo(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        load = rounds_pb2_grpc.TargetWorkerStub(channel).LoadAdapter
        call = load(rounds_pb2.Adapter(name="a"), metadata=metadata, timeout=LIMIT_S)
        assert await call.code() is code
    await server.stop(None)


async def test_trust_with_certificates_proves_both_sides():
    authority = Authority()
    assert await ask(authority.trust(), authority.trust()) == 7


async def test_trust_gateway_without_a_certificate_is_refused():
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(Authority().trust(), Trust(token=TOKEN))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_trust_certificate_of_another_authority_is_refused():
    authority, stranger = Authority(), Authority()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(authority.trust(), stranger.trust(authority=pem(authority.certificate)))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_trust_worker_under_another_name_is_refused():
    authority = Authority()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(authority.trust(name="somebody"), authority.trust())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_trust_incomplete_certificates_are_refused_without_secrets():
    with pytest.raises(ValidationError, match="belong together"):
        Trust(token=TOKEN, certificate=b"c")
    assert TOKEN not in repr(Trust(token=TOKEN))
