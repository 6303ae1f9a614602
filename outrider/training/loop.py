"""The training of a drafter: steps, progress, and going on after a kill."""

import json
import os
from typing import Any

import torch
from torch import Tensor

from outrider.training.losses import distance
from outrider.training.optimization import Optimization
from outrider.training.settings import TrainingSettings
from outrider.training.stream import Stream
from outrider.training.target import Target
from outrider.training.trainee import Trainee

CONSTANT = 1 / 3  # share of the steps before the learning rate falls
UNFINISHED = "unfinished.pt"  # what a killed training goes on from
PROGRESS = "progress.jsonl"
DOES_NOT_MATTER = {"output", "threads", "save_every", "measure_every"}  # to the result
MEASURED_ROWS = 16  # windows of held-out text


class Training:
    """Every batch depends on seed and step alone, so a training that was killed ends like any other."""

    def __init__(self, trainee: Trainee, target: Target, settings: TrainingSettings) -> None:
        self._trainee, self._target, self._settings = trainee, target, settings
        steps = settings.steps
        self._optimization = Optimization("training", [trainee.network], steps, round(CONSTANT * steps))
        self._folder = settings.output

    def run(self, training: Stream, held_out: Stream) -> None:
        """Leaves the checkpoint in the output folder.

        Raises:
            ValueError: the folder has an unfinished training with other settings.
        """
        settings, trainee = self._settings, self._trainee
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        print(f"{trainee.size:,} weights to train, {len(training.tokens):,} tokens of text", flush=True)
        for step in range(self._optimization.step, settings.steps):
            self._optimization.descend(*self._loss(training, step))
            done = step + 1
            if done % settings.measure_every == 0 or done == settings.steps:
                self._measure(held_out, done)
            if done % settings.save_every == 0 and done < settings.steps:
                self._save()
        trainee.save(self._folder)
        (self._folder / UNFINISHED).unlink(missing_ok=True)

    def _loss(self, training: Stream, step: int) -> tuple[Tensor, str]:
        """And a report of it."""
        settings, trainee = self._settings, self._trainee
        generator = torch.Generator().manual_seed(settings.seed * 2**32 + step)
        tokens = training.windows(settings.rows, settings.length, generator)
        reading = self._target.read(tokens, trainee.hidden_layers)
        depth = trainee.depth(step / settings.steps, settings.depth)
        losses, acceptance = [], []
        with torch.autocast("cpu", torch.bfloat16):
            for guess in trainee.guesses(reading, depth, generator):
                found = distance(reading.probs[:, guess.places], guess.logits)
                losses.append(found.loss)
                acceptance.append(1 - found.total_variation.item())
        return torch.stack(losses).mean(), f"sum of minima {_listed(acceptance)}"

    @torch.no_grad()
    def _measure(self, held_out: Stream, step: int) -> None:
        """Told and kept: by position, the part of guesses that no rule could refuse."""
        settings, trainee = self._settings, self._trainee
        generator = torch.Generator().manual_seed(settings.seed)
        length = min(settings.length, len(held_out.tokens))
        tokens = held_out.windows(MEASURED_ROWS, length, generator)
        reading = self._target.read(tokens, trainee.hidden_layers)
        acceptance = []
        for guess in trainee.guesses(reading, settings.depth, None):
            found = distance(reading.probs[:, guess.places], guess.logits)
            acceptance.append(1 - found.total_variation.item())
        print(f"held out, after {step} steps: sum of minima {_listed(acceptance)}", flush=True)
        with (self._folder / PROGRESS).open("a") as file:
            file.write(json.dumps({"step": step, "sum of minima": acceptance}) + "\n")

    def _save(self) -> None:
        state: dict[str, Any] = {
            "settings": self._told(),
            "network": self._trainee.network.state_dict(),
            "optimization": self._optimization.state_dict(),
        }
        partial = self._folder / f"{UNFINISHED}.partial"
        torch.save(state, partial)
        os.replace(partial, self._folder / UNFINISHED)

    def _resume(self) -> None:
        file = self._folder / UNFINISHED
        if not file.exists():
            return
        state = torch.load(file, weights_only=True)
        if state["settings"] != self._told():
            changed = [name for name, value in self._told().items() if state["settings"].get(name) != value]
            raise ValueError(
                f"output={str(self._folder)!r} has an unfinished training with another {', '.join(changed)}: "
                f"give the same, or remove {UNFINISHED}"
            )
        self._trainee.network.load_state_dict(state["network"])
        self._optimization.load_state_dict(state["optimization"])
        print(f"goes on after {self._optimization.step} steps", flush=True)

    def _told(self) -> dict[str, Any]:
        """The settings on which the result depends."""
        settings: dict[str, Any] = self._settings.model_dump(mode="json", exclude=DOES_NOT_MATTER)
        return settings


def _listed(acceptance: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in acceptance)
