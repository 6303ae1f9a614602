"""Steps that a graph computes, by the tokens of their sequences."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from outrider.engine.forward.batch import Batch
from outrider.engine.forward.graphs import Graphs, captured_sizes, chunk_logits, chunk_sizes
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.block_tables import NOTHING_NEW, BlockTables
from outrider.engine.inputs.step_input import Feed, StepInput
from outrider.engine.settings import EngineSettings
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler, simulated_cuda

SETTINGS = EngineSettings(model="any", max_sequences=128)
BLOCKS = 256  # blocks of the longest sequence
CPU = torch.device("cpu")


def graphs_of(
    sizes: tuple[int, ...], logits: int | None, blocks: int = BLOCKS, device: torch.device = CPU
) -> Graphs:
    """Returns graphs whose passes compute nothing."""

    def nothing(batch: Batch) -> ForwardOutput:
        flags = torch.ones(batch.num_tokens, dtype=torch.bool, device=device)
        return ForwardOutput(torch.zeros(batch.num_tokens, 1, device=device), None, flags)

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return lambda: None

    graphs = Graphs(
        nothing,
        capture,
        BlockTables((SETTINGS.max_sequences, blocks), 16, 0, device),
        torch.bfloat16,
        sequences=SETTINGS.max_sequences,
        sizes=sizes,
        as_chains=False,
        logits=logits,
    )
    graphs.capture()
    return graphs


@pytest.fixture(scope="module")
def decoding() -> Graphs:
    return graphs_of(captured_sizes(SETTINGS), None)


@pytest.fixture(scope="module")
def with_prompts() -> Graphs:
    return graphs_of(chunk_sizes(SETTINGS, 2048), chunk_logits(SETTINGS))


def feeds(sequences: int, tokens: int, *, num_logits: int) -> list[Feed]:
    return [Feed([0] * tokens, num_logits, 0, HeldBlocks(range(BLOCKS)), None) for _ in range(sequences)]


def has_batch(graphs: Graphs, fed: list[Feed]) -> bool:
    return graphs.batch(replace(StepInput.of(graphs._tables, fed), new_blocks=NOTHING_NEW)) is not None


@pytest.mark.parametrize(
    ("sequences", "tokens", "has_graph"),
    [(64, 9, True), (128, 5, True), (128, 16, True), (1, 17, True), (8, 32, True), (1, 33, False)],
)
def test_graphs_of_decoding_take_drafts_of_up_to_32_tokens(
    decoding: Graphs, sequences: int, tokens: int, has_graph: bool
) -> None:
    step = feeds(sequences, tokens, num_logits=tokens)
    assert has_batch(decoding, step) == has_graph


@pytest.mark.parametrize(
    ("chunk", "drafted", "has_graph"),
    [(100, 1, True), (512, 5, True), (2048, 3, True), (2048, 5, False)],
)
def test_graphs_with_prompts_take_a_chunk_beside_drafts(
    with_prompts: Graphs, chunk: int, drafted: int, has_graph: bool
) -> None:
    """Two prompts share the chunk, beside 64 sequences that verify."""
    shares = [chunk // 2, chunk - chunk // 2]
    prompts = [feeds(1, share, num_logits=1)[0] for share in shares]
    step = [*prompts, *feeds(64, drafted, num_logits=drafted)]
    assert has_batch(with_prompts, step) == has_graph


def test_graphs_with_prompts_have_room_for_any_number_of_prompts(with_prompts: Graphs) -> None:
    """Their tiles are most if each prompt is the shortest that is none of few tokens."""
    assert has_batch(with_prompts, feeds(62, 33, num_logits=1))


@needs_compiler
def test_graph_step_of_64_sequences_at_32k_copies_kilobytes() -> None:
    """Whole block tables were 64 x 2,112 numbers, a megabyte. Each fifth sequence begins a block here."""
    with simulated_cuda() as cuda, torch.inference_mode():
        graphs = graphs_of((320,), None, blocks=2112, device=torch.device("cuda"))
        held = [HeldBlocks(range(2048)) for _ in range(64)]
        first = [Feed([0] * 5, 5, 32_763, blocks, None) for blocks in held]
        StepInput.of(graphs._tables, first)
        for blocks in held[::5]:
            blocks.push([2048])
        step = StepInput.of(graphs._tables, [structs.replace(feed, start=32_766) for feed in first])
        cuda.counts = Counts()
        batch = graphs.batch(step)
        assert batch is not None
        batch.send()
        batch.compute()
        assert len(step.new_blocks) == 13
        assert cuda.counts.pinned_copies.total() == 1
        assert cuda.counts.bytes_in < 96 * 1024, cuda.counts.report()


def test_graph_with_prompts_too_many_rows_of_logits_get_none(with_prompts: Graphs) -> None:
    assert has_batch(with_prompts, feeds(1, 512, num_logits=512))
    assert not has_batch(with_prompts, feeds(1, 513, num_logits=513))
