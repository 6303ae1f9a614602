"""Optimizer steps with a learning-rate schedule and a progress bar."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

LEARNING_RATE = 5e-3  # peak, for weights that are trained from the beginning
OTHERS = 0.8  # share of the peak for tables of tokens, norms and biases
TABLES = ("embed", "markov_w")  # parts of the names of matrices with a row for each token
WARMUP_STEPS = 40
FINAL_LEARNING_RATE = 0.03  # share of the peak
REPORT_EVERY = 25  # steps


class Optimization:
    """Optimizer steps on one or more models, with progress printed."""

    def __init__(
        self,
        name: str,
        models: list[Any],
        steps: int,
        constant_steps: int,
        peak: float = LEARNING_RATE,
    ) -> None:
        """Makes the optimizers.

        peak: learning rate of hidden matrices; OTHERS times that for other weights.
        """
        named = [
            (name, weight)
            for model in models
            for name, weight in model.named_parameters()
            if weight.requires_grad
        ]
        hidden = [weight for name, weight in named if _is_hidden(name, weight)]
        others = [weight for name, weight in named if not _is_hidden(name, weight)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            muon = torch.optim.Muon(hidden, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            self.optimizers.append(muon)
        if others:
            adamw = torch.optim.AdamW(others, lr=OTHERS * peak, betas=(0.9, 0.95), weight_decay=0.0)
            self.optimizers.append(adamw)
        self.name, self.steps, self.constant_steps = name, steps, constant_steps
        self.schedulers = [LambdaLR(optimizer, self.learning_rate) for optimizer in self.optimizers]
        self.step, self.started = 0, time.monotonic()

    def learning_rate(self, step: int) -> float:
        """Share of the peak: a linear warm-up, a plateau, a linear decay."""
        decayed = max(0, step - self.constant_steps) / max(1, self.steps - self.constant_steps)
        return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - FINAL_LEARNING_RATE) * decayed)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which another optimization goes on."""
        return {
            "step": self.step,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what ``state_dict`` of an optimization with the same models and steps returned."""
        self.step = state["step"]
        for optimizer, of_optimizer in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
        for scheduler, of_scheduler in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(of_scheduler)

    def descend(self, loss: Tensor, report: str) -> None:
        """Takes one step down the loss."""
        torch.autograd.backward(loss)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.step += 1
        if self.step % REPORT_EVERY == 0 or self.step == self.steps:
            filled = 20 * self.step // self.steps
            elapsed = time.monotonic() - self.started
            left = elapsed / self.step * (self.steps - self.step)
            bar = f"[{'#' * filled:<20}] {self.step}/{self.steps}"
            print(f"{self.name} {bar}  {report}  {elapsed:.0f} s, {left:.0f} s left", flush=True)


def _is_hidden(name: str, weight: Tensor) -> bool:
    """Whether a weight is a matrix between states, all of whose rows every step changes."""
    return weight.ndim == 2 and not any(table in name for table in TABLES)
