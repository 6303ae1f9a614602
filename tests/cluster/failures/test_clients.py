"""Clients that leave, that are too many, and that have no more time."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from protos import generation_pb2, generation_pb2_grpc
from tests.support.machines import Machines, body
from tests.support.patience import LIMIT_S, START_S, wait_until
from tests.support.two_machines import MAX_REQUESTS, MAX_WAITING


def test_gone_client_leaves_nothing_behind(machines: Machines) -> None:
    fields = {**body(6, prompt="x", max_tokens=1500, min_tokens=1500), "stream": True, "task": "left"}
    with httpx.stream("POST", f"{machines.http}/v1/completions", json=fields, timeout=LIMIT_S) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # dropping it would close the stream
        next(lines)
        assert machines.busy_pids("target")
    wait_until(lambda: not machines.busy_pids("target") and not machines.busy_pids("draft"))
    assert machines.tokens("left") < 1000  # tokens, fewer than the 1500 of the whole answer


def test_overload_refuses_new_requests_and_loses_no_accepted_request(machines: Machines) -> None:
    url = f"{machines.http}/v1/completions"

    def ask(seed: int) -> httpx.Response:
        return httpx.post(url, json=body(seed, max_tokens=80, min_tokens=80), timeout=START_S)

    count = 3 * (MAX_REQUESTS + MAX_WAITING)
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(ask, range(count)))
    by_status = {status: [a for a in answers if a.status_code == status] for status in (200, 429)}
    assert len(by_status[200]) + len(by_status[429]) == count
    assert len(by_status[200]) >= MAX_REQUESTS
    assert by_status[429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in by_status[429])
    assert all(answer.json()["usage"]["completion_tokens"] == 80 for answer in by_status[200])


CANCELLED_AFTER = [1, 1, 2, 3, 10] * 6


def test_deadline_and_every_cancellation_reach_the_workers(machines: Machines) -> None:
    request = generation_pb2.GenerateRequest(
        text="x", task="cancelled", sampling=generation_pb2.Sampling(max_tokens=1500, min_tokens=1500)
    )
    with grpc.insecure_channel(machines.grpc) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.RpcError) as late:
            list(stub.Generate(request, timeout=0.5))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for tokens in CANCELLED_AFTER:
            call = stub.Generate(request, timeout=LIMIT_S)
            for _ in range(tokens):
                next(call)
            assert machines.busy_pids("target")
            call.cancel()
            wait_until(lambda: not machines.busy_pids("target"))
    assert machines.tokens("cancelled") < 1000 * len(CANCELLED_AFTER)  # none was at its end anyway
