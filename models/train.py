"""Makes the demo pair from scratch on a CPU: `python -m models.train`.

First target and draft together, the draft after the live target's distribution; then the draft alone on what the
target became, half of the text being the target's own. Data, seeds and step counts are fixed.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from models.batches import Stream, make_stream, mixed_batch
from models.corpus import load_corpus
from models.pair import DRAFT, TARGET, new_model, save_model
from models.prompts import DEMO, KINDS
from models.tokenizer import train_tokenizer
from models.writing import write

SEED = 1
WARMUP_STEPS = 40
FINAL_LEARNING_RATE = 0.03  # share of the peak
OPENING_TOKENS = 16  # of a document, from which the target writes on
REPORT_EVERY = 25  # steps


@dataclass(frozen=True)
class Phase:
    """A number of optimizer steps on batches of one shape."""

    steps: int
    rows: int
    length: int


@dataclass(frozen=True)
class Schedule:
    """How much is trained. The learning rate is constant in the first joint phase and decays over the others."""

    characters: int = 9_000_000  # of training text per kind
    joint: tuple[Phase, ...] = (Phase(1000, 16, 256), Phase(450, 8, 512), Phase(100, 2, 2048))
    distillation: Phase = Phase(1000, 10, 384)
    written_rows: int = 64  # per kind and writing temperature
    writing_temperatures: tuple[float, ...] = (1.0, 1.0, 0.7, 0.0)


class Training:
    """Optimizer steps on one or more models, with progress printed."""

    def __init__(self, name: str, models: list[Any], steps: int, constant_steps: int) -> None:
        named = [pair for model in models for pair in model.named_parameters()]
        hidden = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=5e-3, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.name, self.steps, self.constant_steps = name, steps, constant_steps
        self.schedulers = [LambdaLR(optimizer, self.learning_rate) for optimizer in self.optimizers]
        self.step, self.started = 0, time.monotonic()

    def learning_rate(self, step: int) -> float:
        """Share of the peak: a linear warm-up, a plateau, a linear decay."""
        decayed = max(0, step - self.constant_steps) / max(1, self.steps - self.constant_steps)
        return min(1.0, (step + 1) / WARMUP_STEPS) * (1 - (1 - FINAL_LEARNING_RATE) * decayed)

    def descend(self, loss: Tensor, report: str) -> None:
        """Take one step down the loss."""
        loss.backward()
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


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return what the model predicts after each token but the last, float32 [rows, length - 1, vocab_size]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[:, :-1].float()


def divergence(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Cross-entropy of the draft under the target: KL(target, draft) up to a constant, a mean over positions."""
    return -(target_probs * draft_logits.log_softmax(-1)).sum(-1).mean()


def total_variation(target_probs: Tensor, draft_logits: Tensor) -> Tensor:
    """Mean over positions of half the absolute difference, which is 1 - the sum of minima."""
    return 0.5 * (target_probs - draft_logits.softmax(-1)).abs().sum(-1).mean()


def train_jointly(target: Any, draft: Any, streams: dict[str, Stream], phases: tuple[Phase, ...]) -> None:
    """Train the target on text and the draft on the target's distribution."""
    generator = torch.Generator().manual_seed(SEED)
    steps = sum(phase.steps for phase in phases)
    training = Training("target and draft", [target, draft], steps, phases[0].steps)
    for phase in phases:
        for _ in range(phase.steps):
            tokens = mixed_batch(streams, phase.rows, phase.length, generator)
            target_logits = logits_of(target, tokens)
            target_loss = F.cross_entropy(target_logits.flatten(0, 1), tokens[:, 1:].flatten())
            draft_loss = divergence(target_logits.detach().softmax(-1), logits_of(draft, tokens))
            report = f"target {target_loss.item():.3f}, draft {draft_loss.item():.3f}"
            training.descend(target_loss + draft_loss, report)


def write_streams(target: Any, streams: dict[str, Stream], schedule: Schedule) -> dict[str, Stream]:
    """Let the target continue openings of training documents; every row is a document of the returned streams."""
    generator = torch.Generator().manual_seed(SEED + 1)
    length = schedule.distillation.length
    written = {}
    for kind in KINDS:
        rows = []
        for temperature in schedule.writing_temperatures:
            documents = torch.randint(
                len(streams[kind].starts), (schedule.written_rows,), generator=generator
            )
            starts = streams[kind].starts[documents].clamp(max=len(streams[kind].tokens) - OPENING_TOKENS)
            openings = streams[kind].tokens[starts[:, None] + torch.arange(OPENING_TOKENS)]
            rows.append(write(target, openings, length - OPENING_TOKENS, temperature, generator))
        tokens = torch.cat(rows)
        written[kind] = Stream(tokens.flatten(), torch.arange(len(tokens)) * length)
        print(f"text by the target: {kind}, {tokens.numel():,} tokens", flush=True)
    return written


def distill(target: Any, draft: Any, sources: list[dict[str, Stream]], phase: Phase) -> None:
    """Train the draft on KL + 2 * total variation to the finished target, on equal parts of every source."""
    generator = torch.Generator().manual_seed(SEED + 2)
    training = Training("distillation", [draft], phase.steps, phase.steps // 3)
    rows = phase.rows // len(sources)
    for _ in range(phase.steps):
        tokens = torch.cat([mixed_batch(source, rows, phase.length, generator) for source in sources])
        with torch.no_grad():
            target_probs = logits_of(target, tokens).softmax(-1)
        draft_logits = logits_of(draft, tokens)
        distance = total_variation(target_probs, draft_logits)
        report = f"acceptance {1 - distance.item():.3f}"
        training.descend(divergence(target_probs, draft_logits) + 2 * distance, report)


def train(output: Path, schedule: Schedule) -> None:
    """Write target/, draft/ and prompts.json under `output`."""
    torch.manual_seed(SEED)
    corpus = load_corpus(schedule.characters)
    tokenizer = train_tokenizer(sample(corpus.training, schedule.characters // 8))
    streams = {kind: make_stream(tokenizer, corpus.training[kind]) for kind in KINDS}
    for kind, stream in streams.items():
        print(f"{kind}: {len(stream.starts):,} documents, {len(stream.tokens):,} tokens", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "prompts.json").write_text(json.dumps(corpus.held_out, indent=1) + "\n")

    target, draft = new_model(TARGET), new_model(DRAFT)
    train_jointly(target, draft, streams, schedule.joint)
    save_model(target, tokenizer, output / "target")
    written = write_streams(target.eval(), streams, schedule)
    distill(target, draft, [streams, written], schedule.distillation)
    save_model(draft, tokenizer, output / "draft")


def sample(training: dict[str, list[str]], characters: int) -> Iterator[str]:
    """Yield up to about `characters` of every kind, so that no kind owns the vocabulary."""
    for texts in training.values():
        remaining = characters
        for text in texts:
            if remaining <= 0:
                break
            remaining -= len(text)
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.train", description="Make the demo pair from scratch."
    )
    parser.add_argument(
        "--output", type=Path, default=DEMO, help="folder for target/, draft/ and prompts.json"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.output, Schedule())


if __name__ == "__main__":
    main()
