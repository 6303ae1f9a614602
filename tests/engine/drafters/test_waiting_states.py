"""States that wait for a head: when it takes them in, and that its Drafts stay what they are."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.drafters.target_drafter import CommittedStates
from outrider.engine.drafters.waiting_states import MOST_WAITING, WaitingStates
from outrider.engine.loop.engine import Engine
from outrider.engine.sequence import EngineSequence
from outrider.engine.work import Decode, Decoded, plain_decoding
from tests.support.eagle3 import write_eagle3
from tests.support.mtp import write_target
from tests.support.target_drafters import drafter_of, engine_with

BLOCK = 8  # tokens
SHAPE = 2, 3  # layers, numbers of a state
PROMPTS = [tuple(range(3 + number, 17 + 3 * number)) for number in range(4)]
DEPTH, TOKENS = 3, 60


def opened() -> EngineSequence:
    return EngineSequence(0, 4, 1, Sampling(max_tokens=TOKENS), frozenset(), 99)


def states_at(*positions: int) -> Tensor:
    """Returns states that tell their positions."""
    return torch.tensor(positions, dtype=torch.float32)[:, None, None].expand(-1, *SHAPE).clone()


def committed(sequence: EngineSequence, *positions: int, is_wanted: bool = False) -> CommittedStates:
    return CommittedStates(sequence, positions[0], states_at(*positions), is_wanted)


def waiting_for(sequences: int, block_size: int = BLOCK) -> WaitingStates:
    return WaitingStates(sequences, block_size, SHAPE, torch.float32, torch.device("cpu"))


def taken_in(due: Sequence[CommittedStates]) -> list[tuple[EngineSequence, list[float]]]:
    """Returns the positions that are due, by sequence."""
    for part in due:
        assert part.start == part.hidden[0, 0, 0]
    return [(part.sequence, part.hidden[:, 0, 0].tolist()) for part in due]


def test_states_of_an_unfinished_block_wait_until_it_is_full() -> None:
    waiting, first, second = waiting_for(2), opened(), opened()
    assert waiting.add([committed(first, 9, 10, 11), committed(second, 12)]) == []
    assert waiting.add([committed(first, 12, 13), committed(second, 13, 14)]) == []
    assert taken_in(waiting.add([committed(second, 15)])) == [(second, [12, 13, 14, 15])]
    assert taken_in(waiting.add([committed(first, 14, 15, 16)])) == [(first, [9, 10, 11, 12, 13, 14, 15, 16])]


def test_states_are_due_once_a_draft_is_wanted() -> None:
    waiting, sequence = waiting_for(1), opened()
    waiting.add([committed(sequence, 8, 9)])
    assert taken_in(waiting.add([committed(sequence, 10, is_wanted=True)])) == [(sequence, [8, 9, 10])]
    assert taken_in(waiting.add([committed(sequence, 11, is_wanted=True)])) == [(sequence, [11])]


def test_positions_that_are_computed_again_replace_those_that_wait() -> None:
    waiting, sequence = waiting_for(1), opened()
    waiting.add([committed(sequence, 8, 9, 10)])
    waiting.add([CommittedStates(sequence, 9, states_at(90), is_wanted=False)])
    (due,) = waiting.add([committed(sequence, 10, is_wanted=True)])
    assert due.hidden[:, 0, 0].tolist() == [8, 90, 10]


@pytest.mark.parametrize("start", [0, 16])
def test_states_of_a_cache_that_was_lost_are_dropped(start: int) -> None:
    """The sequence is computed again, from its beginning or after blocks that it shares now."""
    waiting, sequence = waiting_for(1), opened()
    waiting.add([committed(sequence, 8, 9, 10)])
    assert taken_in(waiting.add([committed(sequence, start, is_wanted=True)])) == [(sequence, [start])]


def test_states_that_wait_are_a_copy() -> None:
    """A graph writes its next states to the memory of the last."""
    waiting, sequence = waiting_for(1), opened()
    states = states_at(8, 9)
    waiting.add([CommittedStates(sequence, 8, states, is_wanted=False)])
    states.zero_()
    assert taken_in(waiting.add([committed(sequence, 10, is_wanted=True)])) == [(sequence, [8, 9, 10])]


def test_states_of_more_sequences_than_have_room_do_not_wait() -> None:
    waiting, first, second = waiting_for(1), opened(), opened()
    waiting.add([committed(first, 8)])
    assert taken_in(waiting.add([committed(second, 8)])) == [(second, [8])]
    waiting.forget(first)
    assert waiting.add([committed(second, 9)]) == []


def test_no_more_states_wait_than_a_captured_pass_takes() -> None:
    waiting, sequence = waiting_for(1, block_size=1024), opened()
    before = range(1, MOST_WAITING)
    assert waiting.add([committed(sequence, *before)]) == []
    due = waiting.add([committed(sequence, MOST_WAITING)])
    assert taken_in(due) == [(sequence, [*before, MOST_WAITING])]


@pytest.fixture(params=["eagle3", "mtp"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of a target with a head."""
    if request.param == "eagle3":
        return {"drafter": "eagle3", "checkpoint": write_eagle3(tmp_path), "block_size": BLOCK}
    return {"drafter": "mtp", "model": str(write_target(tmp_path, "qwen3")), "block_size": BLOCK}


class PlainThenRounds:
    """Sequences that change between plain decoding and rounds; now and then the sender goes back.

    Each has its own rhythm, so that blocks become full in steps in which other sequences want Drafts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lease = Lease(depth=DEPTH, drafter=next(iter(engine._drafting._in_use)))
        self._until: dict[int, int] = {}  # tokens at which plain decoding ends
        self._plans: dict[int, Iterator[str]] = {}
        self._rhythms: dict[int, Iterator[int]] = {}
        self._rounds = 1
        self.drafts: list[tuple[int, int, Draft]] = []  # each with its sequence, and the tokens before it
        self.preemptions = 0

    def begin(self, prompt: tuple[int, ...]) -> EngineSequence:
        """Lets a sequence begin plainly."""
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=0.7)
        sequence = self._engine.open(len(prompt), noise_key(1, 0, prompt), sampling)
        number = sequence.number
        self._plans[number] = cycle(["round", "round", "plain", "round", "back", "round"])
        place = len(self._rhythms)
        self._rhythms[number] = cycle([2 + place, 19, 5, 3 + 2 * place])
        self._decode_plainly(sequence, 0, prompt)
        return sequence

    def run(self) -> None:
        while self._engine.has_work:
            for result in self._engine.step():
                assert isinstance(result, Decoded)
                self._take(result)

    def _take(self, result: Decoded) -> None:
        sequence = self._engine.sequence(result.sequence)
        length = len(sequence.tokens)
        self.preemptions += result.timings.preemptions
        if result.draft is not None:
            self.drafts.append((sequence.number, length, result.draft))
        if result.finish is not None:
            self._engine.close(sequence)
        elif not result.is_plain or length >= self._until[sequence.number]:
            self._go_on(sequence, result.draft or Draft())

    def _go_on(self, sequence: EngineSequence, draft: Draft) -> None:
        length, what = len(sequence.tokens), next(self._plans[sequence.number])
        if what == "round":
            self._rounds += 1
            self._engine.submit(Decode(sequence.number, length, (), draft, self._rounds, self._lease))
        else:
            unseen = 2 if what == "back" else 0
            self._decode_plainly(sequence, length - unseen)

    def _decode_plainly(self, sequence: EngineSequence, base: int, tokens: tuple[int, ...] = ()) -> None:
        count = next(self._rhythms[sequence.number])
        self._until[sequence.number] = base + len(tokens) + count
        self._engine.submit(plain_decoding(sequence.number, base, tokens, count))


def drafted(settings: dict[str, Any], **more: Any) -> PlainThenRounds:
    """Returns what was drafted for sequences together, and for those that begin as they went on."""
    engine = engine_with(**settings, **more)
    driven = PlainThenRounds(engine)
    begun = [driven.begin(prompt) for prompt in PROMPTS]
    driven.run()
    for sequence in begun:
        driven.begin(tuple(sequence.tokens[:-20]))
    driven.run()
    return driven


@pytest.fixture
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patched:
        patched.setattr(WaitingStates, "add", lambda self, committed: [*committed])
        yield patched


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize(
    "blocks", [pytest.param(400, marks=pytest.mark.slow, id="room"), pytest.param(22, id="preempted")]
)
def test_head_whose_states_wait_drafts_what_it_drafts_without_waiting(
    settings: dict[str, Any], nothing_waits: pytest.MonkeyPatch, blocks: int
) -> None:
    cache = {"cache_memory": blocks * block_bytes(settings)}
    expected = drafted(settings, **cache)
    nothing_waits.undo()
    found = drafted(settings, **cache)
    assert found.drafts == expected.drafts
    assert sum(len(draft) for *_, draft in found.drafts) > 100
    assert (found.preemptions > 0) == (blocks < 100)


def block_bytes(settings: dict[str, Any]) -> int:
    """Returns the bytes of a block, in all layers of target and head."""
    engine = engine_with(**settings, cache_memory=2**22)
    return 2**22 // engine.load().total_blocks


def decoded_plainly(engine: Engine, count: int) -> EngineSequence:
    """Returns a sequence that is still open, with a block of prompt."""
    sequence = engine.open(BLOCK, 1, Sampling(max_tokens=count, ignore_eos=True))
    engine.submit(plain_decoding(sequence.number, 0, PROMPTS[0][:BLOCK], count))
    while engine.has_work:
        engine.step()
    return sequence


def test_sequence_that_shares_blocks_of_plain_decoding_drafts_as_it_does_alone(
    settings: dict[str, Any],
) -> None:
    given = {**settings, "cache_memory": 2**22}
    first, other = engine_with(**given), engine_with(**given)
    prompt = tuple(decoded_plainly(first, 5 * BLOCK).tokens)
    found, alone = PlainThenRounds(first), PlainThenRounds(other)
    free = first.load().free_blocks
    shares = found.begin(prompt)
    first.step()
    assert free - first.load().free_blocks < len(shares.blocks) // 2
    alone.begin(prompt)
    found.run()
    alone.run()
    drafts = [draft for *_, draft in found.drafts]
    assert any(drafts)
    assert drafts == [draft for *_, draft in alone.drafts]


def test_idle_head_takes_a_pass_for_each_block_of_plain_decoding(settings: dict[str, Any]) -> None:
    engine = engine_with(**settings, cache_memory=2**22)
    head = drafter_of(engine)
    with patch.object(head, "_compute", wraps=head._compute) as compute:
        decoded_plainly(engine, 4 * BLOCK + 3)
    of_passes = [len(states) for _, states in (call.args for call in compute.call_args_list)]
    assert of_passes == [BLOCK] * 5  # the prompt's block, and those of the answer
