"""Targets with several MTP layers: a layer for each position of a Draft, against plain arithmetic."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.settings import Sampling
from outrider.engine.drafters.mtp_layers import LayeredMtp
from outrider.engine.loop.engine import Engine
from tests.support.mtp import (
    LAYERS,
    PROMPTS,
    SETTINGS,
    SEVERAL,
    chain_of_layers,
    plain_texts,
    published_layers,
    references,
    write_target,
)
from tests.support.target_drafters import TOKENS, Drafted, drafter_of, engine_with, rounds

KIND = "glm4_moe"
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's tensors
BLOCK = 4 * (LAYERS + SEVERAL) * 2 * 2 * 16 * 4  # bytes of four tokens


def written(folder: Path, kind: str = KIND) -> Path:
    return write_target(folder, kind, published_layers(kind), num_nextn_predict_layers=SEVERAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp(KIND))


@pytest.fixture(scope="module")
def target(folder: Path) -> Engine:
    return target_in(folder)


def target_in(folder: Path, **settings: Any) -> Engine:
    return engine_with("mtp", **{**SETTINGS, "model": str(folder), **settings})


def lengths_of_wrong_drafts(found: list[Drafted], kind: str = KIND) -> list[tuple[int, int]]:
    """Returns prompt and length of the texts after which plain arithmetic does not draft what was drafted."""
    layers, sampling = references(kind), Sampling(temperature=0.7)
    wrong: list[tuple[int, int]] = []
    for number, (prompt, text) in enumerate(zip(PROMPTS, found, strict=False)):
        tokens = [*prompt, *text.tokens]
        hidden = layers[0].hidden(tokens)
        for length, draft in zip(text.lengths, text.drafts, strict=True):
            before = hidden[: length - 1], tokens[:length]
            chain = chain_of_layers(layers, *before, draft.chain_length, sampling, len(prompt))
            if list(draft.tokens[: draft.chain_length]) != chain:
                wrong.append((number, length))
    return wrong


@pytest.mark.parametrize("kind", [KIND, pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_drafts_of_several_layers_are_those_of_plain_arithmetic(tmp_path: Path, kind: str) -> None:
    target = target_in(written(tmp_path, kind))
    assert isinstance(drafter_of(target), LayeredMtp)
    found = rounds(target, PROMPTS, 0.7, 5)
    assert [text.tokens for text in found] == plain_texts(tmp_path, 0.7)
    assert lengths_of_wrong_drafts(found, kind) == []
    for prompt, text in zip(PROMPTS, found, strict=True):  # as deep as there are layers
        end = len(prompt) + TOKENS
        assert [len(draft) for draft in text.drafts] == [min(SEVERAL, end - at - 1) for at in text.lengths]
    assert any(0 < text.accepted < SEVERAL * text.rounds for text in found)  # partly refused Drafts


def test_several_layers_draft_otherwise_than_the_first_layer_alone(target: Engine) -> None:
    found = rounds(target, PROMPTS[:1], 0.7, SEVERAL)
    prompt, text, first = PROMPTS[0], found[0], references(KIND)[0]
    tokens = [*prompt, *text.tokens]
    hidden, sampling = first.hidden(tokens), Sampling(temperature=0.7)
    alone = [
        first.chain(hidden[: length - 1], tokens[:length], len(draft), sampling, len(prompt))
        for length, draft in zip(text.lengths, text.drafts, strict=True)
    ]
    assert [list(draft.tokens) for draft in text.drafts] != alone


def test_nodes_of_a_tree_see_their_own_branch_in_each_layer(folder: Path, target: Engine) -> None:
    layers, sampling = references(KIND), Sampling(temperature=0.7)
    found = rounds(target, PROMPTS, 0.7, SEVERAL, alternatives=6)
    assert [text.tokens for text in found] == plain_texts(folder, 0.7)
    assert lengths_of_wrong_drafts(found) == []
    prompt, text, deepest = PROMPTS[1], found[1], 0
    tokens = [*prompt, *text.tokens]
    hidden = layers[0].hidden(tokens)
    for length, draft in zip(text.lengths, text.drafts, strict=True):
        for parent in {*draft.parents} - {-1}:
            path = [draft.tokens[node] for node in draft.path(parent)]
            children = [draft.tokens[node] for node, above in enumerate(draft.parents) if above == parent]
            states, said = hidden[: length - 1], [*tokens[:length], *path]
            for number, layer in enumerate(layers[: len(path) + 1]):
                after = layer.after(states, said[1 + number : length + number])
                states = layer.normed(after)
            best = layers[len(path)]._best(after[-1:], said, len(children), sampling, len(prompt))
            assert children == best
            deepest = max(deepest, draft.depths[parent] if parent >= draft.chain_length else 0)
    assert deepest > 0  # below an alternative


def test_chunks_and_pauses_change_no_draft_of_several_layers(folder: Path, target: Engine) -> None:
    chunked = target_in(folder, prefill_chunk=24)
    assert lengths_of_wrong_drafts(rounds(chunked, PROMPTS, 0.7, SEVERAL)) == []
    assert lengths_of_wrong_drafts(rounds(target, PROMPTS[:1], 0.7, SEVERAL, plain=(8, 16))) == []


def test_sequence_with_a_shared_prefix_drafts_less_deep_until_each_layer_has_read_a_token(
    folder: Path,
) -> None:
    target = target_in(folder)
    first, again = (rounds(target, [PROMPTS[2]], 0.7, SEVERAL)[0] for _ in range(2))
    assert again.tokens == first.tokens
    assert [len(draft) for draft in first.drafts[:1]] == [SEVERAL]
    assert 0 < len(again.drafts[0]) <= SEVERAL
    assert len(again.drafts[1]) == SEVERAL


@pytest.mark.slow
def test_lost_caches_change_no_draft_of_several_layers(folder: Path) -> None:
    tight = target_in(folder, cache_memory=30 * BLOCK)
    preempted = rounds(tight, PROMPTS, 0.7, SEVERAL)
    assert [text.tokens for text in preempted] == plain_texts(folder, 0.7)
    assert sum(text.preemptions for text in preempted) > 0


def test_closed_sequence_leaves_no_states_of_layers(target: Engine) -> None:
    rounds(target, PROMPTS, 0.7, SEVERAL)
    assert not drafter_of(target)._newest_of


def test_several_layers_count_in_the_memory_of_the_target(target: Engine) -> None:
    drafter = drafter_of(target)
    assert len(drafter.cache_shapes) == SEVERAL
    of_layers = {name: each for name, each in published_layers(KIND).items() if not name.endswith(SHARED)}
    numbers = sum(tensor.numel() for tensor in of_layers.values())
    assert drafter.weight_bytes == numbers * torch.float32.itemsize
