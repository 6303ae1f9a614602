"""Drafting by a target that was trained to be left early: `python -m bench layerskip`.

A stand-in for LayerSkip's checkpoints (Elhoushi et al., arXiv 2404.16710): the demo target, trained further
on text by its recipe. Layers are dropped at random, the deeper the more often, and the state after a layer
has to predict the next token too, through the norm and the head of the model itself. What comes out is an
ordinary Llama checkpoint, and it is read as such: `early_exit` drafts with its first layers and nothing else.
Tokens per pass are counted on it and on the demo target, at a fixed depth on held-out prompts. An answer with
Drafts that differs from the one without is counted too.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.checkpoints import FOLDER
from bench.drafting import asked_of, leaving_early
from bench.report import save, table
from outrider.demo.prompts import DEMO, KINDS, prompts
from workshop.demo.batches import make_stream
from workshop.demo.corpus import load_corpus
from workshop.demo.pair import load_model, load_tokenizer, save_model
from workshop.demo.train import WEIGHTS, Phase, batches
from workshop.training.optimization import Optimization

TARGET = DEMO / "target"
TEXTS = ("code", "prose", "json", "arithmetic")
DROPPED = 0.1  # rate of the last layer; the first one is never dropped
EXITS_WEIGH = 0.5  # to the last layer: at 1 the weight of each is the sum of the numbers up to its own
EVERY = 2  # an exit is trained at each so many steps, in turn; the last layer always
CHARACTERS = 3_000_000  # of training text per kind
LEARNING_RATE = 2e-3


class LeftEarly:
    """A model whose layers are dropped while it is trained, and which keeps the states after them."""

    def __init__(self, model: Any, generator: torch.Generator) -> None:
        self.model = model
        self.states: list[Tensor] = []  # [rows, length, hidden_size] after each layer
        self._generator = generator
        layers = model.model.layers
        rates = [
            math.expm1(number * math.log(2) / (len(layers) - 1)) * DROPPED for number in range(len(layers))
        ]
        self.hooks = [
            layer.register_forward_hook(partial(self._passed, rate))
            for layer, rate in zip(layers, rates, strict=True)
        ]

    def _passed(self, rate: float, layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        """Of some rows the state goes on as if the layer were not there."""
        drawn = torch.rand(len(made), 1, 1, generator=self._generator)
        self.states.append(torch.where(drawn < rate, given[0], made))
        return self.states[-1]

    def loss(self, tokens: Tensor, step: int) -> tuple[Tensor, list[float]]:
        """The weighted mean of the losses after the layers whose turn it is; these, the last layer's last."""
        self.states.clear()
        with torch.autocast("cpu", torch.bfloat16):
            self.model(input_ids=tokens[:, :-1], use_cache=False)
            count = len(self.states)
            exits = [number for number in range(count - 1) if (number + step) % EVERY == 0]
            weights = [EXITS_WEIGH * sum(range(number + 1)) for number in exits]
            weights.append(count - 1 + EXITS_WEIGH * sum(range(count - 1)))
            losses = [self._loss(self.states[number], tokens) for number in (*exits, count - 1)]
        weighted = sum((weight * loss for weight, loss in zip(weights, losses, strict=True)), torch.zeros(()))
        return weighted / sum(weights), [loss.item() for loss in losses]

    def _loss(self, state: Tensor, tokens: Tensor) -> Tensor:
        logits = self.model.lm_head(self.model.model.norm(state)).float()
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(folder: Path, phase: Phase, seed: int = 1) -> None:
    """Writes the checkpoint."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(TARGET)
    corpus = load_corpus(CHARACTERS)
    streams = {kind: make_stream(tokenizer, corpus.training[kind]) for kind in KINDS}
    model = load_model(TARGET).train()
    left_early = LeftEarly(model, torch.Generator().manual_seed(seed))
    optimization = Optimization("layerskip", [model], phase.steps, phase.steps // 3, LEARNING_RATE)
    for step, tokens in enumerate(batches(streams, WEIGHTS, (phase,), seed)):
        loss, told = left_early.loss(tokens, step)
        optimization.descend(loss, " ".join(f"{value:.3f}" for value in told))
    for hook in left_early.hooks:
        hook.remove()
    save_model(model, tokenizer, folder)


def measure(folder: Path, layers: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind of text and temperature."""
    pair = leaving_early(folder, layers, options.threads)
    for kind, temperature in product(options.kinds, options.temperatures):
        asked = asked_of(prompts(kind, options.prompts), temperature, options.tokens)
        tally, plain = pair.tally(asked, options.depth), pair.tally(asked, 0)
        row = {"target": folder.name, "layers": layers, "kind": kind, "temperature": temperature}
        row |= {"rounds": tally.rounds, "tokens per pass": tally.tokens_per_pass}
        yield {**row, "differ": sum(plain.texts[key] != text for key, text in tally.texts.items())}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench layerskip", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="of the training")
    parser.add_argument("--rows", type=int, default=8, help="texts of 256 tokens in each")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4], help="that draft, of six")
    parser.add_argument("--kinds", nargs="+", default=list(TEXTS), choices=KINDS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    trained = FOLDER / "layerskip"
    if not (trained / "config.json").exists():
        print(f"making {trained}", flush=True)
        train(trained, Phase(options.steps, options.rows, 256))
    rows = []
    for folder, layers in product((TARGET, trained), options.layers):
        for row in measure(folder, layers, options):
            rows.append(row)
            print(table(rows[-1:]), flush=True)
    print(save("layerskip", rows, prompts=options.prompts, tokens=options.tokens, depth=options.depth))
