"""grpc.health.v1 of a gateway, asked with the real stub."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.api import grpc_health
from gateway.api.direct import direct_server
from tests.fakes.scripted import ScriptedTarget, fleet_of
from tests.support.grpc_calls import servicer_of
from tests.support.http_calls import ANSWER
from tests.support.patience import LIMIT_S, eventually

OF_SERVER = health_pb2.HealthCheckRequest()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(grpc_health, "LOOK_EVERY_S", 0.001)


@asynccontextmanager
async def asked(tokenizer, *workers):
    """The stub of a gateway that needs a key, and its servicer."""
    async with fleet_of(*workers) as fleet:
        servicer = servicer_of(fleet, tokenizer, keys=["secret"])
        server, port = direct_server(servicer, "127.0.0.1:0", -1)
        await server.start()
        try:
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
                asyncio.timeout(LIMIT_S),
            ):
                yield health_pb2_grpc.HealthStub(channel), servicer
        finally:
            await server.stop(None)


def status(response):
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_watch_tells_the_change_and_ends_when_the_gateway_leaves(tokenizer):
    async with asked(tokenizer, ScriptedTarget(ANSWER)) as (stub, servicer):
        call = stub.Watch(OF_SERVER)
        statuses = aiter(call)
        assert status(await anext(statuses)) == "SERVING"
        servicer.generation.readiness.is_leaving = True
        assert [status(response) async for response in statuses] == ["NOT_SERVING"]
        assert await call.code() is grpc.StatusCode.OK


async def test_watch_without_a_target_tells_not_serving(tokenizer):
    async with asked(tokenizer) as (stub, _):
        assert status(await stub.Watch(OF_SERVER).read()) == "NOT_SERVING"


async def test_watch_of_another_service_does_not_know_it(tokenizer):
    async with asked(tokenizer, ScriptedTarget(ANSWER)) as (stub, _):
        of_another = health_pb2.HealthCheckRequest(service="another.Service")
        assert status(await stub.Watch(of_another).read()) == "SERVICE_UNKNOWN"


async def test_watch_ends_by_itself_with_one_status(tokenizer, monkeypatch):
    monkeypatch.setattr(grpc_health, "WATCH_S", 0.02)
    async with asked(tokenizer, ScriptedTarget(ANSWER)) as (stub, _):
        assert [status(response) async for response in stub.Watch(OF_SERVER)] == ["SERVING"]


async def test_watches_beyond_the_most_are_refused_until_another_ends(tokenizer, monkeypatch):
    monkeypatch.setattr(grpc_health, "MAX_WATCHES", 1)
    async with asked(tokenizer, ScriptedTarget(ANSWER)) as (stub, servicer):
        first = stub.Watch(OF_SERVER)
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(OF_SERVER).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status(await stub.Check(OF_SERVER)) == "SERVING"
        first.cancel()
        await eventually(lambda: servicer._watches == 0)
        assert status(await stub.Watch(OF_SERVER).read()) == "SERVING"


async def test_list_tells_the_status_of_each_service(tokenizer):
    async with asked(tokenizer, ScriptedTarget(ANSWER)) as (stub, _):
        told = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert {name: status(each) for name, each in told.items()} == {
        "": "SERVING",
        "outrider.v1.Generation": "SERVING",
    }
