"""The algorithm of Outrider in one function: coupled speculative decoding of the demo pair.

``python examples/one_process.py`` answers a prompt with and without Drafts. The text is the same: every token
is the target's own choice under keyed noise. A Draft only decides how many tokens a pass yields. The service
adds KV caches, batching, more sampling settings, several processes and fault tolerance.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.decoding.noise import gumbel
from outrider.decoding.philox import noise_key
from outrider.demo.prompts import DEMO, prompts
from outrider.learning.agreement import agreement

Model = Callable[[list[int]], Tensor]  # token ids -> logits, float32 [num_tokens, vocab_size]


@dataclass(frozen=True)
class GeneratedText:
    """Tokens of the target, with the passes and Drafts that they took."""

    tokens: list[int]
    passes: int  # forward passes of the target
    drafted: int  # tokens
    accepted: int  # tokens


def speculate(
    target: Model, draft: Model, prompt: list[int], count: int, depth: int, temperature: float, seed: int
) -> GeneratedText:
    """Generates ``count`` tokens, with Drafts of up to ``depth`` tokens; depth 0 is plain decoding."""
    tokens, passes, drafted, accepted = list(prompt), 0, 0, 0
    key = noise_key(seed, 0, prompt)

    def choose(logits: Tensor, position: int) -> int:
        """Samples by the Gumbel-max trick, with noise that depends only on key, position and token."""
        noise = gumbel([key], [position], len(logits), logits.device)[0]
        return int((logits / temperature + noise).argmax())

    while (left := len(prompt) + count - len(tokens)) > 0:
        guess: list[int] = []
        while len(guess) < min(depth, left - 1):  # the target adds one token itself
            before = tokens + guess
            guess.append(choose(draft(before)[-1], len(before)))
        logits = target(tokens + guess)[-1 - len(guess) :]  # one pass verifies the whole Draft
        own = [choose(row, len(tokens) + i) for i, row in enumerate(logits)]
        correct = agreement(guess, own).correct  # a guess is accepted if it is the target's own token
        tokens += own[: correct + 1]
        passes, drafted, accepted = passes + 1, drafted + len(guess), accepted + correct
    return GeneratedText(tokens[len(prompt) :], passes, drafted, accepted)


def load(role: str) -> Model:
    """Loads a model of the demo pair."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / role).float().eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    target, draft, prompt = load("target"), load("draft"), tokenizer.encode(prompts("json", 1)[0])
    for depth in (0, 4):
        answer = speculate(target, draft, prompt, count=48, depth=depth, temperature=0.7, seed=1)
        print(f"depth {depth}: {answer.passes} passes, {answer.accepted} of {answer.drafted} accepted")
        print(tokenizer.decode(answer.tokens), end="\n\n")


if __name__ == "__main__":
    main()
