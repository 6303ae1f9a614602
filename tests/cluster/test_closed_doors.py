"""Several of everything behind closed doors: two gateways, targets and drafts, mutual TLS, API keys."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from outrider.demo.prompts import KINDS, prompts
from protos import generation_pb2, generation_pb2_grpc, rounds_pb2, rounds_pb2_grpc
from protos.trust import NAME
from tests.fakes.authority import Authority
from tests.support.patience import LIMIT_S
from tests.support.running import Service, serving
from tests.support.served import SERVED

pytestmark = pytest.mark.slow

KEY = "a key of this test"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("closed")
    trust = authority.trust()
    files = {"access.api_keys_file": "keys"}
    for name in ("certificate", "key", "authority"):
        content = getattr(trust, name)
        assert content is not None
        (folder / name).write_bytes(content)
        files[f"tls.{name}"] = name
    (folder / "keys").write_text(KEY + "\n")
    two = dict.fromkeys(("gateway.replicas", "target.replicas", "drafts.model.replicas"), 2)
    with serving(folder, {**two, **files, **SERVED}) as service:
        yield service


def test_seeded_text_of_two_replicas_is_equal_with_drafts(closed: Service) -> None:
    with openai.OpenAI(base_url=f"{closed.http}/v1", api_key=KEY, max_retries=0) as client:

        def ask(number: int, mode: str) -> str:
            return (
                client.completions.create(
                    model="outrider-demo-small",
                    prompt=prompts(KINDS[number % len(KINDS)], 48)[number],
                    max_tokens=32,
                    seed=number,
                    extra_body={"speculation": {"mode": mode}},
                )
                .choices[0]
                .text
            )

        with ThreadPoolExecutor(8) as pool:
            plain = list(pool.map(lambda number: ask(number, "off"), range(40)))
            drafted = list(pool.map(lambda number: ask(number, "auto"), range(40)))
    assert drafted == plain
    workers = httpx.get(f"{closed.http}/health", headers={"Authorization": f"Bearer {KEY}"}).json()["workers"]
    assert [worker["role"] for worker in workers].count("target") == 2
    assert [worker["role"] for worker in workers].count("draft") == 2


def test_service_without_a_key_answers_nobody(closed: Service) -> None:
    assert httpx.post(f"{closed.http}/v1/completions", json={"prompt": "x"}).status_code == 401
    assert httpx.get(f"{closed.http}/health").json().keys() == {"status"}
    with grpc.insecure_channel(closed.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetModel(generation_pb2.GetModelRequest(), timeout=LIMIT_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        model = stub.GetModel(
            generation_pb2.GetModelRequest(), timeout=LIMIT_S, metadata=(("authorization", f"Bearer {KEY}"),)
        )
    assert model.id == "outrider-demo-small"


def test_worker_answers_no_stranger(closed: Service, authority: Authority) -> None:
    workers = httpx.get(f"{closed.http}/health", headers={"Authorization": f"Bearer {KEY}"}).json()["workers"]
    address = workers[0]["address"]
    trust = authority.trust()  # a certificate of the right authority, but not the deployment's token
    credentials = grpc.ssl_channel_credentials(trust.authority, trust.key, trust.certificate)
    options = (("grpc.ssl_target_name_override", NAME),)
    for channel, code in (
        (grpc.insecure_channel(address), grpc.StatusCode.UNAVAILABLE),
        (grpc.secure_channel(address, credentials, options), grpc.StatusCode.UNAUTHENTICATED),
    ):
        with channel:
            call = rounds_pb2_grpc.TargetWorkerStub(channel).Stream(
                iter([rounds_pb2.TargetWorkerRequest()]), metadata=trust.metadata, timeout=LIMIT_S
            )
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
            assert refused.value.code() is code
