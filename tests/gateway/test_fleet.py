"""A stream goes to the least busy worker of its role."""

import pytest

from decoding.settings import Sampling
from gateway import table
from gateway.errors import InvalidRequestError
from gateway.fleet import Fleet, Worker
from gateway.sequence import Sequence


def worker(address, role="target"):
    return Worker(role, "model", address, pid=1, node="n", vocab_size=256, max_length=2048)


async def test_streams_spread_over_the_replicas_and_come_back(monkeypatch):
    fleet = Fleet(lambda: [worker("127.0.0.1:1"), worker("127.0.0.1:2"), worker("127.0.0.1:3", "draft")])
    sequence = Sequence((1,), Sampling(), noise_key=0)
    async with fleet.open_target(sequence), fleet.open_target(sequence), fleet.open_draft(sequence):
        assert dict(fleet._streams) == {"127.0.0.1:1": 1, "127.0.0.1:2": 1, "127.0.0.1:3": 1}
    assert not any(fleet._streams.values())
    await fleet.close()


async def test_every_stream_opens_under_an_epoch_of_its_own():
    fleet = Fleet(lambda: [worker("127.0.0.1:1"), worker("127.0.0.1:2", "draft")])
    sequence = Sequence((1,), Sampling(), noise_key=0)
    async with fleet.open_target(sequence) as target, fleet.open_draft(sequence) as draft:
        assert (target.turn().epoch, draft.turn().epoch) == (1, 2)
    await fleet.close()


@pytest.fixture
def empty_table(monkeypatch):
    monkeypatch.setattr(table, "_BY_DEPLOYMENT", {})


def test_the_table_holds_the_newest_workers_of_each_deployment(empty_table):
    table.put("Target", [vars(worker("a:1")), vars(worker("b:1"))])
    table.put("Draft", [vars(worker("c:1", "draft"))])
    table.put("Target", [vars(worker("b:1"))])
    assert [entry.address for entry in table.workers()] == ["b:1", "c:1"]


def test_a_refusal_survives_the_way_through_serve_s_proxy():
    import pickle

    error = pickle.loads(pickle.dumps(InvalidRequestError("top_p", "must be at most 1")))
    assert (error.field, str(error)) == ("top_p", "top_p: must be at most 1")
