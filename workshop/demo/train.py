"""Makes the demo pair from scratch on a CPU: `python -m workshop.demo.train`.

First the target is trained alone, on text of all kinds. Then target and draft are trained together, mostly on
text that refers to its context; the draft learns the target's current distribution. Then the draft is
distilled from the fixed target, which writes half of the text. Last, the target is trained on long text, of
which the earlier stages had little. Data, seeds and step counts are fixed.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.demo.prompts import DEMO, KINDS
from workshop.demo.batches import make_stream, mixed_batch
from workshop.demo.corpus import DRAWS, REPETITIONS, load_corpus, shorten
from workshop.demo.pair import DRAFT, TARGET, load_model, new_model, save_model
from workshop.demo.tokenizer import train_tokenizer
from workshop.demo.writing import sampler, write
from workshop.training.losses import distance
from workshop.training.optimization import Optimization
from workshop.training.stream import Stream

SEED = 1
OPENING_TOKENS = 16  # first tokens of a document, which the target continues


@dataclass(frozen=True)
class Phase:
    """Number of optimizer steps on batches of one shape."""

    steps: int
    rows: int
    length: int


# share of the windows by kind: kinds that are hard to predict get the largest shares
WEIGHTS = {
    "code": 36,
    "prose": 24,
    "json": 11,
    "question_answer": 9,
    "stories": 7,
    "arithmetic": 7,
    "conversations": 9,
    "tool_calls": 16,
    "schema_answers": 16,
}
READING_WEIGHTS = {
    "code": 14,
    "prose": 9,
    "json": 4,
    "question_answer": 3,
    "stories": 3,
    "arithmetic": 3,
    "conversations": 10,
    "tool_calls": 22,
    "schema_answers": 22,
    REPETITIONS: 10,
}


@dataclass(frozen=True)
class Schedule:
    """Amount of training. The learning rate is constant in the first of several phases, then decays."""

    characters: int = 9_000_000  # characters of training text per kind
    draws: int = DRAWS  # generated documents from which held-out prompts are chosen
    target: tuple[Phase, ...] = (Phase(1200, 16, 256), Phase(480, 8, 512), Phase(96, 2, 2048))
    reading: tuple[Phase, ...] = (Phase(500, 8, 512), Phase(400, 8, 512), Phase(50, 2, 2048))
    distillation: Phase = Phase(1000, 10, 384)
    lengthening: tuple[Phase, ...] = (Phase(120, 2, 2048),)
    written_rows: int = 64  # rows per kind and writing temperature
    writing_temperatures: tuple[float, ...] = (1.0, 1.0, 0.7, 0.0)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns the logits after all tokens but the last, float32 [rows, length - 1, vocab_size]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[:, :-1].float()


def batches(
    streams: dict[str, Stream], weights: dict[str, int], phases: tuple[Phase, ...], seed: int
) -> Iterator[Tensor]:
    """Yields a batch for every step, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    for phase in phases:
        for _ in range(phase.steps):
            yield mixed_batch(streams, weights, phase.rows, phase.length, generator)


def optimization_of(name: str, models: list[Any], phases: tuple[Phase, ...]) -> Optimization:
    """Returns an optimization whose learning rate is constant in the first of several phases."""
    constant_steps = phases[0].steps if len(phases) > 1 else 0
    return Optimization(name, models, sum(phase.steps for phase in phases), constant_steps)


def train_target(target: Any, streams: dict[str, Stream], phases: tuple[Phase, ...], seed: int) -> None:
    """Trains the target on text."""
    optimization = optimization_of("target", [target], phases)
    for tokens in batches(streams, WEIGHTS, phases, seed):
        loss = cross_entropy(logits_of(target, tokens).flatten(0, 1), tokens[:, 1:].flatten())
        optimization.descend(loss, f"{loss.item():.3f}")


def train_jointly(target: Any, draft: Any, streams: dict[str, Stream], phases: tuple[Phase, ...]) -> None:
    """Trains the target on text and the draft on the target's distribution."""
    optimization = optimization_of("target and draft", [target, draft], phases)
    for tokens in batches(streams, READING_WEIGHTS, phases, SEED + 3):
        target_logits = logits_of(target, tokens)
        target_loss = cross_entropy(target_logits.flatten(0, 1), tokens[:, 1:].flatten())
        target_probs = target_logits.detach().softmax(-1)
        draft_loss = distance(target_probs, logits_of(draft, tokens)).divergence.mean()
        report = f"target {target_loss.item():.3f}, draft {draft_loss.item():.3f}"
        optimization.descend(target_loss + draft_loss, report)


def write_streams(target: Any, streams: dict[str, Stream], schedule: Schedule) -> dict[str, Stream]:
    """Lets the target continue openings of training documents, and returns the texts."""
    generator = torch.Generator().manual_seed(SEED + 1)
    length = schedule.distillation.length
    written = {}
    for kind in KINDS:
        rows = []
        for temperature in schedule.writing_temperatures:
            openings = streams[kind].openings(schedule.written_rows, OPENING_TOKENS, generator)
            choose = sampler(temperature, generator)
            rows.append(write(target, openings, length - OPENING_TOKENS, choose))
        tokens = torch.cat(rows)
        written[kind] = Stream(tokens.flatten(), torch.arange(len(tokens)) * length)
        print(f"text by the target: {kind}, {tokens.numel():,} tokens", flush=True)
    return written


def distill(target: Any, draft: Any, sources: list[dict[str, Stream]], phase: Phase) -> None:
    """Trains the draft on KL + 2 * total variation to the fixed target, on equal parts of every source."""
    generator = torch.Generator().manual_seed(SEED + 2)
    optimization = Optimization("distillation", [draft], phase.steps, phase.steps // 3)
    rows = phase.rows // len(sources)
    for _ in range(phase.steps):
        tokens = torch.cat(
            [mixed_batch(source, WEIGHTS, rows, phase.length, generator) for source in sources]
        )
        with torch.no_grad():
            target_probs = logits_of(target, tokens).softmax(-1)
        found = distance(target_probs, logits_of(draft, tokens))
        acceptance = 1 - found.total_variation.mean().item()
        optimization.descend(found.loss.mean(), f"acceptance {acceptance:.3f}")


def train(output: Path, schedule: Schedule) -> None:
    """Writes target/, draft/ and prompts.json under `output`."""
    torch.manual_seed(SEED)
    corpus = load_corpus(schedule.characters, schedule.draws)
    # equal parts, so that no kind dominates the vocabulary
    parts = [shorten(corpus.training[kind], schedule.characters // 8) for kind in KINDS]
    tokenizer = train_tokenizer(text for part in parts for text in part)
    streams = {kind: make_stream(tokenizer, corpus.training[kind]) for kind in KINDS}
    for kind, stream in streams.items():
        print(f"{kind}: {len(stream.starts):,} documents, {len(stream.tokens):,} tokens", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "prompts.json").write_text(json.dumps(corpus.held_out, indent=1) + "\n")

    target, draft = new_model(TARGET), new_model(DRAFT)
    train_target(target, streams, schedule.target, SEED)
    save_model(target, tokenizer, output / "target")
    target = load_model(output / "target").train()
    even = {kind: make_stream(tokenizer, texts) for kind, texts in corpus.even.items()}
    streams |= even
    train_jointly(target, draft, streams, schedule.reading)
    save_model(target, tokenizer, output / "target")
    written = write_streams(target.eval(), streams, schedule)
    distill(target, draft, [streams, written], schedule.distillation)
    save_model(draft, tokenizer, output / "draft")
    target = load_model(output / "target").train()
    train_target(target, streams, schedule.lengthening, SEED + 4)
    save_model(target, tokenizer, output / "target")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workshop.demo.train", description=__doc__)
    parser.add_argument("--output", type=Path, default=DEMO, help="folder for the pair and its prompts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.output, Schedule())


if __name__ == "__main__":
    main()
