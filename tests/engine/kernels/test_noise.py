"""The noise of the kernels is that of outrider.decoding.noise, to the last of its random bits."""

import pytest
import torch

from outrider.decoding import noise

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
kernels = pytest.importorskip("outrider.engine.kernels.noise", reason="needs triton: pip install triton")
tl = triton.language
gumbel_at, gumbel_of_blocks = kernels.gumbel_at, kernels.gumbel_of_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def store_noise(keys, positions, of_blocks, of_tokens):
    key, position = tl.load(keys), tl.load(positions)
    at = tl.arange(0, 1024)
    tl.store(of_blocks + at, gumbel_of_blocks(key, position, 16, 128))
    tl.store(of_tokens + at, gumbel_at(key, position, 128 + at))


@pytest.mark.parametrize(("key", "position"), [(2**64 - 1, 7), (5, 2**31 - 1), (10**18, 0)])
def test_noise_is_that_of_the_reference(key: int, position: int) -> None:
    expected = noise.gumbel([key], [position], 128 + 1024)[0, 128:]
    found = torch.empty(2, 1024, device=DEVICE)
    signed = torch.tensor([key - (key >> 63 << 64)], device=DEVICE)
    store_noise[1,](signed, torch.tensor([position], device=DEVICE), found[0], found[1])
    # One random bit more or less would be seen: neighbouring words differ by as much as this, and more.
    torch.testing.assert_close(found.cpu(), expected.expand(2, -1), rtol=1e-6, atol=1e-6)
