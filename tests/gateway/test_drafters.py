"""What makes a Draft, seen from the gateway."""

from decoding.settings import Sampling
from gateway.drafters import ModelDrafter, NgramDrafter
from gateway.sequence import Sequence
from protos import rounds_pb2


class Stream:
    """A draft worker that has answered the rounds in ``answered``; no time passes."""

    def __init__(self):
        self.answered = set()
        self.asked = []  # (round, depth)
        self.waits = []  # seconds

    def turn(self):
        return rounds_pb2.Turn()

    async def send(self, request):
        self.asked.append(request.propose.depth)

    async def receive(self, round_number, timeout):
        self.waits.append(timeout)
        return rounds_pb2.DraftReply(round=round_number) if round_number in self.answered else None


def sequence_at(round_number, *generated):
    return Sequence((1, 2, 3), Sampling(), noise_key=0, round=round_number, generated=list(generated))


async def test_an_overdue_draft_is_not_waited_for_again_and_nothing_more_is_asked():
    stream = Stream()
    drafter = ModelDrafter(stream, deadline_s=0.5)
    assert await drafter.propose(sequence_at(2), 4) is None
    assert await drafter.propose(sequence_at(3), 5) is None
    assert stream.asked == [4]
    assert stream.waits == [0.5, 0.0]


async def test_drafts_are_asked_for_again_once_the_overdue_one_is_there():
    stream = Stream()
    drafter = ModelDrafter(stream, deadline_s=0.5)
    await drafter.propose(sequence_at(2), 4)
    stream.answered = {2, 3}
    assert await drafter.propose(sequence_at(3), 5) is not None
    assert stream.asked == [4, 5]


async def test_taking_in_the_prompt_waits_for_no_answer():
    stream = Stream()
    assert await ModelDrafter(stream, deadline_s=0.5).propose(sequence_at(1), 0) is not None
    assert (stream.asked, stream.waits) == ([0], [])


async def test_ngrams_are_looked_up_in_prompt_and_output():
    drafter = NgramDrafter()
    await drafter.propose(sequence_at(1), 0)
    draft = await drafter.propose(sequence_at(2, 9, 1), 3)
    assert list(draft.tokens) == [2, 3, 9]
    draft = await drafter.propose(sequence_at(3, 9, 1, 7, 9), 2)
    assert list(draft.tokens) == [1, 7]
