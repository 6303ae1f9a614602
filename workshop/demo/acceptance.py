"""Measures the agreement of the demo pair on the target's own text: `python -m workshop.demo.acceptance`.

The target writes under keyed noise, as in serving; both models then read the text. Up to the first rejected
token, draft and target have read the same tokens. So one pass over the finished text yields every round.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.noise import gumbel
from outrider.decoding.philox import noise_key
from outrider.demo.prompts import DEMO, KINDS, prompts
from workshop.demo.pair import load_model, load_tokenizer
from workshop.demo.tokenizer import END, END_OF_TEXT, PAD
from workshop.demo.writing import write

TEMPERATURES = (0.0, 0.7, 1.0)
DEPTH = 4  # drafted tokens per round
BRANCHES = (4, 8, 12)
SEED = 7


class RoundOutcome(NamedTuple):
    """Outcome of a round, relative to the guesses of the draft."""

    accepted: int
    rank: int  # rank of the target's next token among the draft's own guesses there; 0: the best


@dataclass(frozen=True)
class PairAgreement:
    """Agreement of two models along one text."""

    overlap: list[float]  # per position: sum over tokens of min(draft_probs, target_probs)
    ranks: list[int]  # per position: tokens that the draft prefers to the target's token, with equal noise


@dataclass(frozen=True)
class Acceptance:
    """Acceptance on one kind of text at one temperature."""

    overlap: float
    coupled: float
    tokens_per_round: float
    foreseen: dict[int, float]  # share of rounds with a prepared outcome, by number of branches


def perturbed(logits: Tensor, keys: list[int], positions: list[int], temperature: float) -> Tensor:
    """Returns scores whose argmax is the choice under keyed noise, float32 [rows, vocab_size]."""
    if temperature == 0:
        return logits
    return logits / temperature + gumbel(keys, positions, logits.shape[-1])


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Returns the sampling distribution at a temperature; at 0 it is one-hot at the largest logit."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return (logits / temperature).softmax(-1)


def written_texts(target: Any, texts: list[list[int]], count: int, temperature: float) -> list[list[int]]:
    """Returns the target's text after each prompt, up to `count` tokens or its first end token."""
    longest = max(map(len, texts))
    padding = [longest - len(text) for text in texts]
    rows = torch.tensor([[PAD] * pad + text for pad, text in zip(padding, texts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    keys = [noise_key(SEED, 0, text) for text in texts]

    def choose(logits: Tensor, written: int) -> Tensor:
        positions = [len(text) + written for text in texts]
        return perturbed(logits, keys, positions, temperature).argmax(-1)

    continued = write(target, rows, count, choose, mask)[:, longest:].tolist()
    return [until_end(tokens) for tokens in continued]


def until_end(tokens: list[int]) -> list[int]:
    """Returns the tokens up to and including the first end token."""
    ends = (index for index, token in enumerate(tokens) if token in (END_OF_TEXT, END))
    return tokens[: next(ends, len(tokens)) + 1]


@torch.inference_mode()
def agreement(
    target: Any, draft: Any, prompt: list[int], text: list[int], temperature: float
) -> PairAgreement:
    """Lets both models read a text that the target wrote after a prompt."""
    tokens = torch.tensor([prompt + text])
    span = slice(len(prompt) - 1, -1)
    target_logits = target(input_ids=tokens).logits[0, span]  # [num_tokens, vocab_size]
    draft_logits = draft(input_ids=tokens).logits[0, span]
    positions = list(range(len(prompt), len(prompt) + len(text)))
    keys = [noise_key(SEED, 0, prompt)] * len(text)
    scores = perturbed(draft_logits, keys, positions, temperature)
    chosen = scores.gather(-1, torch.tensor(text)[:, None])
    draft_probs, target_probs = (probabilities(x, temperature) for x in (draft_logits, target_logits))
    overlap = torch.minimum(draft_probs, target_probs).sum(-1)
    return PairAgreement(overlap.tolist(), (scores > chosen).sum(-1).tolist())


def rounds(ranks: list[int], depth: int) -> list[RoundOutcome]:
    """Returns the rounds of a text with `depth` drafted tokens, without an incomplete last round."""
    outcomes, start = [], 0
    while start + depth < len(ranks):
        accepted = next((i for i, rank in enumerate(ranks[start : start + depth]) if rank > 0), depth)
        outcomes.append(RoundOutcome(accepted, ranks[start + accepted]))
        start += accepted + 1
    return outcomes


def foreseen(seen: list[RoundOutcome], judged: list[RoundOutcome], branches: int) -> float:
    """Returns the share of judged rounds whose outcome is among the most frequent outcomes of seen rounds."""
    prepared = {outcome for outcome, _ in Counter(seen).most_common(branches)}
    return mean([float(outcome in prepared) for outcome in judged])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def measure(pair: tuple[Any, Any], texts: list[list[int]], temperature: float, count: int) -> Acceptance:
    """Returns the figures of a (target, draft) pair on prompts of one kind.

    Branches are chosen on the rounds of every other prompt and judged on the rest.
    """
    target, draft = pair
    written = written_texts(target, texts, count, temperature)
    agreements = [
        agreement(target, draft, prompt, text, temperature)
        for prompt, text in zip(texts, written, strict=True)
    ]
    by_text = [rounds(found.ranks, DEPTH) for found in agreements]
    outcomes = [outcome for found in by_text for outcome in found]
    seen = [outcome for found in by_text[::2] for outcome in found]
    judged = [outcome for found in by_text[1::2] for outcome in found]
    return Acceptance(
        overlap=mean([value for found in agreements for value in found.overlap]),
        coupled=mean([float(rank == 0) for found in agreements for rank in found.ranks]),
        tokens_per_round=mean([outcome.accepted + 1.0 for outcome in outcomes]),
        foreseen={branches: foreseen(seen, judged, branches) for branches in BRANCHES},
    )


def report(folder: Path, prompts_per_kind: int, count: int) -> None:
    """Prints the figures of the pair in a folder as a table in Markdown."""
    pair = load_model(folder / "target"), load_model(folder / "draft")
    tokenizer = load_tokenizer(folder / "target")
    branches = " | ".join(f"foreseen by {number}" for number in BRANCHES)
    print(f"| kind | temperature | sum of minima | coupled | tokens per round | {branches} |")
    print("|---" * (5 + len(BRANCHES)) + "|")
    for kind in KINDS:
        texts = [tokenizer.encode(prompt).ids for prompt in prompts(kind, prompts_per_kind)]
        for temperature in TEMPERATURES:
            found = measure(pair, texts, temperature, count)
            figures = [found.overlap, found.coupled, found.tokens_per_round, *found.foreseen.values()]
            print(
                f"| {kind} | {temperature} | {' | '.join(f'{figure:.2f}' for figure in figures)} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.demo.acceptance", description="Measure the demo pair."
    )
    parser.add_argument("--pair", type=Path, default=DEMO, help="folder with target/ and draft/")
    parser.add_argument("--prompts", type=int, default=48, help="held-out prompts per kind")
    parser.add_argument("--tokens", type=int, default=160, help="tokens written after each prompt at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report(arguments.pair, arguments.prompts, arguments.tokens)


if __name__ == "__main__":
    main()
