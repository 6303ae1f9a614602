"""The fleet chooses the worker that holds the prefix, else the least busy worker."""

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from gateway.adapter import NO_ADAPTER, Adapter
from gateway.errors import InvalidRequestError, WorkerLostError
from gateway.sequence import GatewaySequence
from gateway.workers import connection, registry
from gateway.workers.fleet import IMBALANCE, Fleet
from gateway.workers.streams import LOAD_AGE_S, WorkerInfo
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from tests.fakes.scripted import TRUST, ScriptedTarget, fleet_of


def worker(address, role="target"):
    draft = "model" if role == "draft" else ""
    return WorkerInfo(role, "m", address, pid=1, node="n", vocab_size=256, max_length=2048, draft=draft)


def sequence(*prompt, adapter=NO_ADAPTER):
    return GatewaySequence(prompt or (1,), Sampling(), noise_key=0, adapter=adapter)


@pytest.fixture
async def fleet():
    fleet = Fleet(
        lambda: [worker("127.0.0.1:1"), worker("127.0.0.1:2"), worker("127.0.0.1:3", "draft")], TRUST
    )
    yield fleet
    await fleet.close()


def streams(fleet):
    return {link.worker.address[-1]: link.streams for link in fleet.links()}


async def test_fleet_several_replicas_spreads_streams(fleet):
    opened = [fleet.open_target(sequence(n)) for n in range(4)] + [fleet.open_draft("model", sequence())]
    assert streams(fleet) == {"1": 2, "2": 2, "3": 1}
    for stream in opened:
        stream.close()
    assert streams(fleet) == {"1": 0, "2": 0, "3": 0}


async def test_fleet_open_twice_gives_each_stream_its_own_epoch(fleet):
    opening = sequence()
    with closing(fleet.open_target(opening)) as target, closing(fleet.open_draft("model", opening)) as draft:
        assert (target._epoch, draft._epoch, opening.epoch) == (1, 2, 2)


async def test_fleet_known_prefix_chooses_the_worker_that_has_it(fleet):
    first = fleet.open_target(sequence(*range(200)))
    second = fleet.open_target(sequence(*range(150)))
    assert streams(fleet) == {"1": 2, "2": 0, "3": 0}
    first.close()
    second.close()


async def test_fleet_known_prefix_at_a_busy_worker_chooses_another(fleet):
    opened = [fleet.open_target(sequence(*range(200))) for _ in range(2 * IMBALANCE)]
    counts = streams(fleet)
    assert counts["1"] > counts["2"] > 0
    assert counts["1"] - counts["2"] <= IMBALANCE + 1
    for stream in opened:
        stream.close()


async def test_fleet_suspect_worker_is_chosen_last(fleet):
    lost = fleet.open_target(sequence(*range(200)))  # no server listens there
    with pytest.raises(WorkerLostError, match="target worker 127"):
        await lost.receive(1)
    lost.close()
    opened = [fleet.open_target(sequence(*range(200))) for _ in range(3)]
    assert streams(fleet) == {"1": 0, "2": 3, "3": 0}
    for stream in opened:
        stream.close()


async def test_fleet_isolated_sequences_get_a_target_each(fleet):
    first = fleet.open_target(sequence(1), is_isolated=True)
    second = fleet.open_target(sequence(2), is_isolated=True)
    assert streams(fleet) == {"1": 1, "2": 1, "3": 0}
    with pytest.raises(WorkerLostError, match="no isolated sequence"):
        fleet.open_target(sequence(3), is_isolated=True)
    others = [fleet.open_target(sequence(4))]  # nothing is known against it
    fleet.cleared(second)
    others.append(fleet.open_target(sequence(3), is_isolated=True))
    assert others[-1].address == second.address
    fleet.cleared(second)  # a second token says nothing of the next trial there
    with pytest.raises(WorkerLostError, match="no isolated sequence"):
        fleet.open_target(sequence(5), is_isolated=True)
    first.close()
    others.append(fleet.open_target(sequence(5), is_isolated=True))
    assert others[-1].address == first.address
    for stream in (second, *others):
        stream.close()


async def test_fleet_load_of_other_gateways_counts_while_it_is_fresh(fleet):
    now = asyncio.get_running_loop().time()
    link = fleet.links()[0]
    link.load, link.replied_at = rounds_pb2.Load(running=3, waiting=2), now
    assert link.num_sequences(now) == 5
    assert link.num_sequences(now + 2 * LOAD_AGE_S) == 0


async def test_fleet_worker_gone_is_forgotten_after_its_streams():
    workers = [worker("127.0.0.1:1")]
    fleet = Fleet(lambda: workers, TRUST)
    stream = fleet.open_target(sequence())
    workers[:] = [worker("127.0.0.1:2")]
    assert streams(fleet) == {"2": 0}
    assert len(fleet._links) == 2
    stream.close()
    fleet.links()
    assert [*fleet._links] == ["127.0.0.1:2"]
    await fleet.close()


async def test_connection_message_not_taken_in_time_ends(monkeypatch):
    """No stream waits for an answer to a lost message; the next stream has a new connection."""
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.01)
    async with fleet_of(ScriptedTarget([7])) as fleet:
        streams = [fleet.open_target(sequence(number)) for number in (1, 2)]
        stalled = fleet.links()[0].connection()
        stalled._call.write = lambda message: asyncio.Event().wait()
        streams[0].send(rounds_pb2.TargetWorkerRequest())
        for stream in streams:
            with pytest.raises(WorkerLostError, match="no message was taken"):
                await stream.receive(1)
            with pytest.raises(WorkerLostError):
                stream.send(rounds_pb2.TargetWorkerRequest())
            stream.close()
        assert fleet.links()[0].connection() is not stalled


async def test_connection_requests_of_one_turn_travel_together():
    async with fleet_of(ScriptedTarget([7])) as fleet:
        carried = []
        write = fleet.links()[0].connection()._call.write
        fleet.links()[0].connection()._call.write = lambda message: carried.append(message) or write(message)
        opened = [fleet.open_target(sequence(number)) for number in range(5)]
        for stream in opened:
            decode = rounds_pb2.Decode(turn=stream.turn(1))
            stream.send(rounds_pb2.TargetWorkerRequest(decode=decode))
        for stream in opened:
            assert list((await stream.receive(1)).tokens) == [7]
            stream.close()
        assert len(carried[0].requests) == 2 * len(opened)


async def test_fleet_long_sequence_chooses_a_worker_with_room():
    small = replace(worker("127.0.0.1:1"), max_length=100)
    fleet = Fleet(lambda: [small, worker("127.0.0.1:2")], TRUST)
    long = GatewaySequence((1,), Sampling(max_tokens=100), noise_key=0)
    opened = [fleet.open_target(long) for _ in range(3)]
    assert streams(fleet) == {"1": 0, "2": 3}
    for stream in opened:
        stream.close()
    await fleet.close()


async def test_fleet_draft_with_padded_vocabulary_bans_the_extra_ids():
    """Embeddings are padded; rejection sampling could not undo a guess unknown to the target."""
    target, draft = worker("127.0.0.1:1"), replace(worker("127.0.0.1:2", "draft"), vocab_size=259)
    fleet = Fleet(lambda: [target, draft], TRUST)
    asked = GatewaySequence((1,), Sampling(bad_token_ids=(5,)), noise_key=0)
    with (
        closing(fleet.open_draft("model", asked)) as to_draft,
        closing(fleet.open_target(asked)) as to_target,
    ):
        assert list(to_draft._opening().sampling.bad_token_ids) == [5, 256, 257, 258]
        assert list(to_target._opening().sampling.bad_token_ids) == [5]
    await fleet.close()


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_BY_DEPLOYMENT", {})


def test_registry_put_twice_holds_the_newest_workers(empty_registry):
    registry.put("Target", [vars(worker("a:1")), vars(worker("b:1"))])
    registry.put("Draft", [vars(worker("c:1", "draft"))])
    registry.put("Target", [vars(worker("b:1"))])
    assert [entry.address for entry in registry.workers()] == ["b:1", "c:1"]


def test_invalid_request_error_survives_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(InvalidRequestError("top_p", "must be at most 1")))
    assert (error.field, str(error)) == ("top_p", "top_p: must be at most 1")


async def test_fleet_prefix_of_another_adapter_is_no_reason_for_a_worker(fleet):
    prompt = range(200)
    with (
        closing(fleet.open_target(sequence(*prompt))),
        closing(fleet.open_target(sequence(*prompt, adapter=Adapter("a")))),
    ):
        assert streams(fleet) == {"1": 1, "2": 1, "3": 0}
        with closing(fleet.open_target(sequence(*prompt, adapter=Adapter("a")))):
            assert streams(fleet) == {"1": 1, "2": 2, "3": 0}
