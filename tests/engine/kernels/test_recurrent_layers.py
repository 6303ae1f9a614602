"""Recurrent layers on a GPU: near those of a CPU, the same for a sequence in any company.

Triton's interpreter computes them where there is no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.decoding.draft import ROOT, Draft
from outrider.engine.cache.recurrent_states import RecurrentStates
from outrider.engine.forward.delta_net import DeltaNet
from outrider.engine.forward.mamba2 import Mamba2
from outrider.engine.forward.recurrent_layer import RecurrentLayer
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.held_state import HeldState
from outrider.engine.inputs.block_tables import NOTHING_NEW
from outrider.engine.inputs.recurrence import Recurrence, begun_uses, recurrences
from outrider.engine.inputs.step_input import NO_CHANGES, Feed, StepInput

pytest.importorskip("outrider.engine.kernels.recurrent", reason="needs triton: pip install triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS, REPEATS, KEY_DIM, VALUE_DIM, TAPS = 1, 2, 8, 24, 4  # two programs for a head
HEADS, CHANNELS, SLOTS = GROUPS * REPEATS, 2 * GROUPS * KEY_DIM + GROUPS * REPEATS * VALUE_DIM, 4
LAYER = 5
COMMON = {"conv_dim": CHANNELS, "conv_kernel_size": TAPS, "layer_idx": LAYER}
DELTA_NET = {
    **COMMON,
    **{"num_k_heads": GROUPS, "num_v_heads": HEADS, "head_k_dim": KEY_DIM, "head_v_dim": VALUE_DIM},
    "key_dim": GROUPS * KEY_DIM,
}
MAMBA = {
    **COMMON,
    **{"n_groups": GROUPS, "num_heads": HEADS, "ssm_state_size": KEY_DIM, "head_dim": VALUE_DIM},
    "time_step_limit": (0.3, 2.0),
}
TREE = Draft(tuple(range(9)), (ROOT, 0, 0, ROOT, 3, 2, 4, ROOT, 4))


def theirs_with(fields: dict[str, Any], has_bias: bool) -> Any:
    """A module with random weights in place of transformers'."""
    generator = torch.Generator().manual_seed(0)
    theirs: Any = nn.Module()
    for name, value in fields.items():
        setattr(theirs, name, value)
    theirs.conv1d = nn.Conv1d(CHANNELS, CHANNELS, TAPS, groups=CHANNELS, bias=has_bias)
    theirs.conv1d.weight.data = torch.randn(CHANNELS, 1, TAPS, generator=generator)
    if has_bias:
        theirs.conv1d.bias.data = torch.randn(CHANNELS, generator=generator)
    for name in ("A_log", "dt_bias", "D"):
        setattr(theirs, name, nn.Parameter(torch.randn(HEADS, generator=generator)))
    return theirs.to(DEVICE).requires_grad_(False)


@pytest.fixture(scope="module", params=["Gated DeltaNet", "Mamba-2", "Mamba-2 without biases"])
def net(request: pytest.FixtureRequest) -> RecurrentLayer:
    if request.param == "Gated DeltaNet":
        return DeltaNet(theirs_with(DELTA_NET, has_bias=False))
    return Mamba2(theirs_with(MAMBA, has_bias=request.param == "Mamba-2"))


@dataclass
class Memory:
    """States of some sequences, and what passes over them have found."""

    net: RecurrentLayer
    by_kernel: bool

    def __post_init__(self) -> None:
        self.states = RecurrentStates({LAYER: self.net.shape}, SLOTS, torch.float32, DEVICE)
        self.states.kept.all_states.fill_(torch.nan)

    def run(self, *fed: tuple[Feed, Tensor]) -> list[Tensor]:
        """Outputs of a pass, for each feed."""
        feeds = [feed for feed, _ in fed]
        step = StepInput(NO_CHANGES, feeds, NOTHING_NEW, begun_uses(feeds))
        order, records = recurrences(step), torch.cat([records for _, records in fed]).to(DEVICE)
        output = torch.zeros(len(records), HEADS, VALUE_DIM, device=DEVICE)
        program = self.states.program_of(order) if self.by_kernel else None
        batch: Any = SimpleNamespace(recurrences=order, state_program=program)
        self.net._compute_all(batch, records, output, self.states.layers[LAYER])
        for recurrence in order:
            recurrence.finish()
        return [*output.split_with_sizes([len(records) for _, records in fed])]


def records(width: int, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator)


def feed(held: HeldState, start: int, count: int, committed: int, tree: Draft | None = None) -> Feed:
    return Feed([0] * count, 0, start, HeldBlocks([]), tree, state=held, committed=committed)


# A prompt in two chunks, a chain, a tree after it, more tokens than a ring holds, two tokens.
PASSES = (
    (0, 20, 20, None),  # start, tokens, committed, tree
    (20, 3, 23, None),
    (23, 5, 24, None),  # two of four nodes are accepted
    (26, 10, 27, TREE),
    (27, 70, 97, None),
    (97, 1, 98, None),
    (98, 1, 99, None),
)


def found_in(
    memory: Memory, count: int = len(PASSES), beside: Sequence[tuple[Feed, Tensor]] = ()
) -> list[Tensor]:
    """What a sequence finds in the first passes."""
    held = HeldState(1, ends={16: 2, 40: 3})
    found = []
    for start, tokens, committed, tree in PASSES[:count]:
        own = (feed(held, start, tokens, committed, tree), records(memory.net.shape.record, tokens, start))
        found.append(memory.run(*beside, own)[-1])
    return found


@torch.inference_mode()
def test_kernel_finds_what_a_cpu_finds_in_prompts_chains_and_trees(net: RecurrentLayer) -> None:
    ours, theirs = Memory(net, by_kernel=True), Memory(net, by_kernel=False)
    for found, expected in zip(found_in(ours), found_in(theirs), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    for name in ("states", "tails", "records"):
        own, other = (getattr(memory.states.layers[LAYER], name) for memory in (ours, theirs))
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)
    kept, expected_kept = ours.states.kept, theirs.states.kept
    filled = [2, 3]
    torch.testing.assert_close(
        kept.all_states[:, filled], expected_kept.all_states[:, filled], atol=2e-5, rtol=2e-5
    )
    torch.testing.assert_close(kept.all_tails, expected_kept.all_tails)


@pytest.mark.slow
@torch.inference_mode()
def test_sequence_has_the_same_bits_alone_and_beside_others(net: RecurrentLayer) -> None:
    alone, together = Memory(net, by_kernel=True), Memory(net, by_kernel=True)
    other = HeldState(3)
    beside = [(feed(other, 0, 7, 0), records(net.shape.record, 7, 99))]
    for found, expected in zip(found_in(together, 4, beside), found_in(alone, 4), strict=True):
        assert torch.equal(found, expected)


@torch.inference_mode()
def test_token_has_the_same_bits_in_a_chunk_alone_and_as_a_node(net: RecurrentLayer) -> None:
    whole, rows = Memory(net, by_kernel=True), records(net.shape.record, 12, 3)
    (expected,) = whole.run((feed(HeldState(0), 0, 12, 12), rows))
    one_by_one, held = Memory(net, by_kernel=True), HeldState(0)
    found = [one_by_one.run((feed(held, at, 1, at + 1), rows[at : at + 1]))[0] for at in range(12)]
    assert torch.equal(torch.cat(found), expected)
    as_nodes, held = Memory(net, by_kernel=True), HeldState(0)
    as_nodes.run((feed(held, 0, 8, 8), rows[:8]))
    tree = Draft((1, 2, 3, 4, 5, 6, 7, 8), (ROOT, ROOT, 1, 0, 2, ROOT, 4, 0))  # 1, 2, 4, 6 are the chain
    nodes = rows[[0, 8, 9, 1, 10, 2, 11, 3]]
    (drafted,) = as_nodes.run((feed(held, 8, 8, 8, tree), nodes))
    assert torch.equal(drafted[[1, 2, 4, 6]], expected[8:])


def test_program_of_a_chain_computes_each_step_once(net: RecurrentLayer) -> None:
    held = HeldState(0)
    held.finish(held.begin(0, 10, 10))
    step = [feed(held, 10, 3, 13)]
    order: list[Recurrence] = recurrences(StepInput(NO_CHANGES, step, NOTHING_NEW, begun_uses(step)))
    program = RecurrentStates({LAYER: net.shape}, SLOTS, torch.float32, DEVICE).program_of(order)
    assert program.operations[:, 0].tolist() == [0, 1, 2]
    assert program.sequences.tolist() == [[0, 3, order[0].use.read, order[0].use.write]]
