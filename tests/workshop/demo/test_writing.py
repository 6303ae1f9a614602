"""Text written by a model in padded batches."""

import torch

from workshop.demo.pair import DRAFT, new_model
from workshop.demo.writing import sampler, write


def test_greedy_rows_in_a_padded_batch_equal_generate() -> None:
    torch.manual_seed(0)
    model = new_model(DRAFT).eval()
    for weight in model.parameters():  # as made, it would repeat the last token whatever came before
        torch.nn.init.normal_(weight)
    model.generation_config.eos_token_id = None
    prompts = [[10, 11, 12, 13, 14], [20, 21]]
    rows = torch.tensor([prompts[0], [1, 1, 1, *prompts[1]]])
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    written = write(model, rows, 8, sampler(0, torch.Generator()), mask)
    for row, prompt in zip(written, prompts, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert row[-8:].tolist() == expected[0, -8:].tolist()


def test_sampling_follows_temperature() -> None:
    logits = torch.log(torch.tensor([[0.8, 0.2]])).expand(4000, 2)
    generator = torch.Generator().manual_seed(0)
    share = {t: sampler(t, generator)(logits, 0).float().mean().item() for t in (0.0, 0.5, 1.0)}
    assert share[0.0] == 0
    assert abs(share[0.5] - 0.04 / 0.68) < 0.02
    assert abs(share[1.0] - 0.2) < 0.03
