"""The learning-rate schedule and the steps."""

import pytest
import torch

from workshop.training.optimization import FINAL_LEARNING_RATE, WARMUP_STEPS, Optimization


def test_learning_rate_warms_up_stays_and_decays() -> None:
    schedule = Optimization("test", [torch.nn.Linear(2, 2)], steps=200, constant_steps=100).learning_rate
    assert schedule(0) == 1 / WARMUP_STEPS
    assert schedule(WARMUP_STEPS) == schedule(100) == 1
    assert schedule(150) == pytest.approx((1 + FINAL_LEARNING_RATE) / 2)
    assert schedule(200) == pytest.approx(FINAL_LEARNING_RATE)


def test_steps_go_down_the_loss_and_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(4, 4), torch.randn(16, 4)
    optimization = Optimization("toy", [model], steps=60, constant_steps=60)
    losses = []
    for _ in range(60):
        loss = (model(inputs) - inputs).square().mean()
        losses.append(loss.item())
        optimization.descend(loss, f"loss {loss.item():.3f}")
    assert losses[-1] < 0.9 * losses[0]
    assert "toy [####################] 60/60  loss" in capsys.readouterr().out
