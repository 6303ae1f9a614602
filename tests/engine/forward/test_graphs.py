"""Steps that a graph computes, by the tokens of their sequences."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.forward.graphs import Graphs, captured_sizes, chunk_logits, chunk_sizes
from outrider.engine.inputs.step_input import Feed
from outrider.engine.settings import EngineSettings

SETTINGS = EngineSettings(model="any", max_sequences=128)
BLOCKS = 256  # blocks of the longest sequence
CPU = torch.device("cpu")


def graphs_of(sizes: tuple[int, ...], logits: int | None) -> Graphs:
    """Returns graphs whose passes nobody computes."""
    cache: Any = SimpleNamespace(spare_block=0, block_size=16)
    graphs = Graphs(
        lambda batch: pytest.fail("a pass is computed"),
        lambda work: lambda: None,
        cache,
        torch.bfloat16,
        CPU,
        sequences=SETTINGS.max_sequences,
        blocks=BLOCKS,
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
    return [Feed([0] * tokens, num_logits, 0, np.arange(BLOCKS), None) for _ in range(sequences)]


@pytest.mark.parametrize(
    ("sequences", "tokens", "has_graph"),
    [(64, 9, True), (128, 5, True), (128, 16, True), (1, 17, True), (8, 32, True), (1, 33, False)],
)
def test_graphs_of_decoding_take_drafts_of_up_to_32_tokens(
    decoding: Graphs, sequences: int, tokens: int, has_graph: bool
) -> None:
    step = feeds(sequences, tokens, num_logits=tokens)
    assert (decoding.batch(step) is not None) == has_graph


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
    assert (with_prompts.batch(step) is not None) == has_graph


def test_graphs_with_prompts_have_room_for_any_number_of_prompts(with_prompts: Graphs) -> None:
    """Their tiles are most if each prompt is the shortest that is none of few tokens."""
    assert with_prompts.batch(feeds(62, 33, num_logits=1)) is not None


def test_graph_with_prompts_too_many_rows_of_logits_get_none(with_prompts: Graphs) -> None:
    assert with_prompts.batch(feeds(1, 512, num_logits=512)) is not None
    assert with_prompts.batch(feeds(1, 513, num_logits=513)) is None
