"""Attention of many chains at once against each of them alone."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from workshop.training.chains import Chains

LENGTH, DEPTH, HEADS, DIM = 9, 3, 2, 8


def drawn(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, count, DIM, generator=generator) for _ in range(3)]


def plain_attention(given: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = given
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)


def attended(chains: Chains, given: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = given
    return chains.attend(0, query, key, value, scaling=0.3)


def alone(start: int, passes: list[list[torch.Tensor]], index: int) -> torch.Tensor:
    """Returns the attention of a chain's last token: it sees the text up to its start, then the chain."""
    text, *grown = passes
    query = grown[-1][0][:, :, index : index + 1]
    keys, values = (
        torch.cat(
            [text[part][:, :, : start + 1], *(each[part][:, :, index : index + 1] for each in grown)], 2
        )
        for part in (1, 2)
    )
    return scaled_dot_product_attention(query, keys, values, scale=0.3)


def test_chain_sees_the_text_up_to_its_start_and_itself() -> None:
    chains, passes = Chains(), [drawn(LENGTH, 0)]
    output = attended(chains, passes[0])
    torch.testing.assert_close(output, plain_attention(passes[0]), atol=1e-5, rtol=1e-5)
    starts = [0, 3, 4, 8]
    chains.start(torch.tensor(starts))
    for depth in range(1, DEPTH + 1):
        passes.append(drawn(len(starts), depth))
        output = attended(chains, passes[-1])
        for index, start in enumerate(starts):
            wanted = alone(start, passes, index)
            torch.testing.assert_close(output[:, :, index : index + 1], wanted, atol=1e-5, rtol=1e-5)


def test_chains_that_are_kept_go_on_as_if_there_had_been_no_others() -> None:
    all_of_them, kept = Chains(), Chains()
    text, first, second = drawn(LENGTH, 0), drawn(4, 1), drawn(4, 2)
    for chains in (all_of_them, kept):
        attended(chains, text)
        chains.start(torch.tensor([1, 2, 5, 7]))
        attended(chains, first)
    which = torch.tensor([1, 3])
    kept.keep(which)
    assert kept.starts is not None
    assert kept.starts.tolist() == [2, 7]
    wanted = attended(all_of_them, second)[:, :, which]
    found = attended(kept, [part[:, :, which] for part in second])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
