"""Training of a drafter: steps, progress, and going on after a kill."""

import json
import os
from itertools import accumulate
from operator import mul
from typing import Any, TypedDict

import torch
from torch import Tensor

from workshop.training.held_out import HeldOut
from workshop.training.losses import distance
from workshop.training.optimization import Optimization
from workshop.training.settings import TrainingSettings
from workshop.training.stream import Stream
from workshop.training.target import FrozenTarget
from workshop.training.trainee import Trainee

CONSTANT = 1 / 3  # share of the steps before the learning rate falls
UNFINISHED = "unfinished.pt"  # file that a killed training goes on from
PROGRESS = "progress.jsonl"
DOES_NOT_MATTER = {"output", "threads", "save_every"}  # settings that do not change the result


class Best(TypedDict):
    """Weights that were best on held-out text, and their step."""

    step: int
    network: dict[str, Tensor]


class Training:
    """Training whose batches depend on seed and step alone, so a killed training ends like any other."""

    def __init__(
        self, trainee: Trainee, target: FrozenTarget, settings: TrainingSettings, held_out: HeldOut
    ) -> None:
        self._trainee, self._target, self._settings = trainee, target, settings
        self._held_out = held_out
        trainee.network.to(target.device)
        steps = settings.steps
        self._optimization = Optimization(
            "training", [trainee.network], steps, round(CONSTANT * steps), settings.learning_rate
        )
        self._folder = settings.output
        self._progress: list[dict[str, Any]] = []
        self._best: Best | None = None  # kept if there is a patience

    def run(self, training: Stream) -> None:
        """Trains, and leaves the last weights in the trainee; with a patience the best that were measured.

        Raises:
            ValueError: the folder has an unfinished training with other settings.
        """
        settings, trainee = self._settings, self._trainee
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        print(f"{trainee.size:,} weights to train, {len(training.tokens):,} tokens of text", flush=True)
        if settings.patience is not None and not self._progress:
            self._measure(0)
        for step in range(self._optimization.step, settings.steps):
            if self._has_no_patience:
                print(f"it has not become better since step {self.best_step}", flush=True)
                break
            self._optimization.descend(*self._loss(training, step))
            done, is_last = step + 1, step + 1 == settings.steps
            if done % settings.measure_every == 0 or is_last:
                self._measure(done)
            if done % settings.save_every == 0 or is_last:
                self._save()
        if self._best is not None:
            trainee.network.load_state_dict(self._best["network"])

    def finish(self) -> None:
        """Writes the checkpoint, and removes the file of unfinished training."""
        self._trainee.save(self._folder)
        (self._folder / UNFINISHED).unlink(missing_ok=True)

    @property
    def steps(self) -> int:
        """Number of steps that were taken."""
        return self._optimization.step

    @property
    def best_step(self) -> int:
        """Number of steps after which the weights are as they are left."""
        return self.steps if self._best is None else self._best["step"]

    def _loss(self, training: Stream, step: int) -> tuple[Tensor, str]:
        """Returns the loss of a step, and a report of it."""
        settings, trainee, target = self._settings, self._trainee, self._target
        generator = torch.Generator().manual_seed(settings.seed * 2**32 + step)
        length = min(settings.length, len(training.tokens))
        tokens = training.windows(settings.rows, length, generator).to(target.device)
        reading = target.read(tokens, trainee.hidden_layers)
        depth = trainee.depth(step / settings.steps, settings.depth)
        losses, weights, acceptance = [], [], []
        certain = reach = torch.ones((), device=target.device)  # probability that a guess counts
        with target.training():
            for guess in trainee.guesses(reading, depth, generator):
                found = distance(reading.probs[:, guess.places, : guess.logits.shape[-1]], guess.logits)
                reach = reach if guess.continues_chain else certain
                losses.append((reach * found.loss).mean())
                weights.append(reach.mean())
                accepted = 1 - found.total_variation.detach()
                reach = reach * accepted
                acceptance.append(accepted.mean().item())
        return torch.stack(losses).sum() / sum(weights), f"sum of minima {_listed(acceptance)}"

    def _measure(self, step: int) -> None:
        """Measures, prints and keeps the result, with the weights if these are the best."""
        title = self._held_out.title
        acceptance = self._held_out.measure(self._trainee, self._target)
        print(f"held out, after {step} steps: {title} {_listed(acceptance)}", flush=True)
        self._progress.append({"step": step, title: acceptance})
        lines = (json.dumps(line) + "\n" for line in self._progress)
        (self._folder / PROGRESS).write_text("".join(lines))
        if self._settings.patience is not None and self._best_index == len(self._progress) - 1:
            weights = {name: tensor.clone() for name, tensor in self._trainee.network.state_dict().items()}
            self._best = {"step": step, "network": weights}

    @property
    def _best_index(self) -> int:
        """Returns the index of the first best measure: the most tokens in a round."""
        worths = [sum(accumulate(line[self._held_out.title], mul)) for line in self._progress]
        return worths.index(max(worths))

    @property
    def _has_no_patience(self) -> bool:
        patience = self._settings.patience
        return patience is not None and len(self._progress) - 1 - self._best_index >= patience

    def _save(self) -> None:
        state: dict[str, Any] = {
            "settings": self._told(),
            "network": self._trainee.network.state_dict(),
            "optimization": self._optimization.state_dict(),
            "progress": self._progress,
            "best": self._best,
        }
        partial = self._folder / f"{UNFINISHED}.partial"
        torch.save(state, partial)
        os.replace(partial, self._folder / UNFINISHED)

    def _resume(self) -> None:
        file = self._folder / UNFINISHED
        if not file.exists():
            return
        state = torch.load(file, map_location=self._target.device, weights_only=True)
        if state["settings"] != self._told():
            changed = [name for name, value in self._told().items() if state["settings"].get(name) != value]
            raise ValueError(
                f"output={str(self._folder)!r} has an unfinished training with another {', '.join(changed)}: "
                f"give the same, or remove {UNFINISHED}"
            )
        self._trainee.network.load_state_dict(state["network"])
        self._optimization.load_state_dict(state["optimization"])
        self._progress, self._best = state["progress"], state["best"]
        print(f"goes on after {self._optimization.step} steps", flush=True)

    def _told(self) -> dict[str, Any]:
        """Returns the settings on which the result depends."""
        settings: dict[str, Any] = self._settings.model_dump(mode="json", exclude=DOES_NOT_MATTER)
        return settings


def _listed(acceptance: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in acceptance)
