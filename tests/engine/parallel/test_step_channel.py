"""What rank 0 tells arrives at every rank in order and whole, through shared memory or by gloo."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from outrider.engine.errors import RankLostError
from outrider.engine.parallel.step_channel import RING, OverGloo, OverSharedMemory, shared_memory
from tests.support.ranks import Ranks

READERS = 2


@pytest.fixture
def ends() -> Iterator[tuple[OverSharedMemory, list[OverSharedMemory], list[socket.socket]]]:
    """Rank 0's end of a channel, the readers' ends, and the connections: rank 0's, then the readers'."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(READERS)]
    memory = shared_memory(READERS)
    leader = OverSharedMemory(memory, [ours for ours, _ in pairs])
    readers = [OverSharedMemory(memory, [theirs], number) for number, (_, theirs) in enumerate(pairs)]
    os.close(memory)
    connections = [*(ours for ours, _ in pairs), *(theirs for _, theirs in pairs)]
    yield leader, readers, connections
    for connection in connections:
        connection.close()


def test_channel_through_memory_messages_arrive_at_every_rank_in_order(ends) -> None:
    leader, readers, _ = ends
    messages = [np.arange(start, start + length) for start, length in ((5, 1), (100, 4), (7, 300))]
    for message in messages:
        leader.send(message)
    for reader in readers:
        assert [reader.receive().tolist() for _ in messages] == [message.tolist() for message in messages]


@pytest.mark.parametrize("length", [RING - 1, RING, 2 * RING + 5])
def test_channel_through_memory_rank_0_waits_until_all_have_read_what_it_replaces(ends, length: int) -> None:
    leader, readers, _ = ends
    messages = [np.arange(length) + number for number in range(3)]
    sending = threading.Thread(target=lambda: [leader.send(message) for message in messages])
    sending.start()
    came: list[list[bool]] = [[] for _ in readers]

    def receive(reader: OverSharedMemory, found: list[bool]) -> None:
        found += [bool(np.array_equal(reader.receive(), message)) for message in messages]

    threads = [threading.Thread(target=receive, args=pair) for pair in zip(readers, came, strict=True)]
    for thread in threads:
        thread.start()
    for thread in (sending, *threads):
        thread.join()
    assert came == [[True] * 3] * READERS


def test_channel_through_memory_waiting_rank_takes_no_processor(ends) -> None:
    leader, (reader, _), _ = ends
    taken: list[float] = []

    def wait() -> None:
        before = time.thread_time()
        reader.receive()
        taken.append(time.thread_time() - before)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)  # the time for which it waits
    assert not taken
    leader.send(np.arange(3))
    waiting.join()
    assert taken[0] < 0.03


def test_channel_through_memory_reader_notices_that_rank_0_is_gone(ends) -> None:
    _, (reader, _), connections = ends
    connections[0].close()
    with pytest.raises(RankLostError, match="rank 0 of the group is gone"):
        reader.receive()


def test_channel_through_memory_rank_0_notices_that_a_reader_is_gone(ends) -> None:
    leader, _, connections = ends
    connections[-1].close()
    with pytest.raises(RankLostError, match="a rank of the group is gone"):
        leader.send(np.arange(3))


def test_channel_through_memory_rank_0_with_a_full_ring_notices_that_a_reader_is_gone(ends) -> None:
    leader, (reader, _), connections = ends
    leader.send(np.arange(RING))
    reader.receive()
    connections[-1].close()
    with pytest.raises(RankLostError, match="its connection has ended"):
        leader.send(np.arange(3))


def channel_here(group: object) -> str:
    return type(group._channel).__name__  # type: ignore[attr-defined]


@pytest.mark.slow
def test_ranks_of_one_node_share_memory_and_of_several_nodes_use_gloo(ranks: Ranks, apart: Ranks) -> None:
    assert ranks.run(channel_here, channel_here) == [OverSharedMemory.__name__] * 2
    assert apart.run(channel_here, channel_here) == [OverGloo.__name__] * 2
