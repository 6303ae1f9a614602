"""What one end tells in one go is read whole at the other, however it arrives."""

import socket

import pytest

from actors.connection import Connection, Frames, frame_of
from actors.messages import Close, Open, Submit, ToEngine, decode_to_engine
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.engine.work import Decode

MESSAGES = [
    Open(7, 3, 2**64 - 1, Sampling(temperature=0.5, logit_bias={5: -2.5}, stop_token_ids=(1, 2), seed=2**63)),
    Submit(Decode(7, 0, (1, 2, 3), Draft.chain([4, 5]), 1, Lease(depth=2)), 1, 0.25),
    Close(7),
]


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_frames_are_whole_however_their_bytes_come(size: int) -> None:
    frames, data = Frames(), frame_of(MESSAGES) + frame_of(MESSAGES[:1])
    contents = [content for at in range(0, len(data), size) for content in frames.take(data[at : at + size])]
    assert [decode_to_engine(content) for content in contents] == [MESSAGES, MESSAGES[:1]]


def test_connection_waiting_gets_messages_and_the_end_of_its_peer() -> None:
    one, other = socket.socketpair()
    connection = Connection[ToEngine](other, decode_to_engine)
    assert connection.receive(timeout=0.0) == []
    assert not connection.has_come()
    Connection[ToEngine](one, decode_to_engine).send(*MESSAGES)
    assert connection.has_come()
    assert connection.receive() == MESSAGES
    assert not connection.has_come()
    one.close()
    assert connection.has_come()
    with pytest.raises(EOFError):
        connection.receive()
    other.close()


def test_settings_that_are_not_acceptable_do_not_get_through() -> None:
    data = frame_of(
        [{"type": "Open", "sequence": 1, "prompt_length": 3, "noise_key": 1, "sampling": {"top_p": 2}}]
    )
    with pytest.raises(ValueError, match="top_p"):
        decode_to_engine(data[4:])
