"""A toy target and draft whose texts have known probabilities, and the test that texts have them.

Models are tables of logits [vocab_size, vocab_size], the row chosen by the last token (first-order Markov).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from scipy.stats import chi2
from torch import Tensor

from outrider.decoding.choice_context import ChoiceContext
from outrider.decoding.draft import ROOT, Draft, SparseProbs, Verdict
from outrider.decoding.gumbel_max import gumbel_max
from outrider.decoding.sampling import choose, probabilities, process
from outrider.decoding.settings import Sampling
from outrider.decoding.verify import sample_draft_token, verify_coupled

FALSE_ALARM = 1e-4  # per hypothesis test; keys are fixed, so a test that passes once keeps passing
DETECTED = 1e-6  # what a wrong rule must fall below
PROMPT = (0,)

Text = tuple[int, ...]
Rule = Callable[[Draft, Tensor, int, int, int], Verdict]
Draws = Callable[[Tensor, int, int, int], tuple[int, SparseProbs]]


def random_model(vocab_size: int, seed: int, spread: float = 1.5) -> Tensor:
    return torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def row(sampling: Sampling, generated: Sequence[int], path: Text = (), noise_key: int = 0) -> ChoiceContext:
    position = len(PROMPT) + len(generated) + len(path)
    return ChoiceContext(sampling, noise_key, position, PROMPT, generated, path, end_token_ids=frozenset({1}))


def logits_of(model: Tensor, rows: Sequence[ChoiceContext]) -> Tensor:
    return model[[(*PROMPT, *context.generated, *context.path)[-1] for context in rows]]


def text_probabilities(target: Tensor, sampling: Sampling, length: int) -> dict[Text, float]:
    """The target's own probability of every text of that length."""
    texts: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        rows = [row(sampling, text) for text in texts]
        probs = probabilities(process(logits_of(target, rows), rows)).double()
        probs /= probs.sum(dim=1, keepdim=True)
        texts = {
            (*text, token): texts[text] * prob
            for text, row_probs in zip(texts, probs.tolist(), strict=True)
            for token, prob in enumerate(row_probs)
        }
    return texts


def p_value(texts: Iterable[Text], probs: dict[Text, float]) -> float:
    """Chance of texts at least as far off by Pearson's chi-square; 0 if one of them is impossible.

    Neighbouring texts share a cell until five of them are expected.
    """
    counts = Counter(texts)
    if any(probs.get(text, 0.0) == 0.0 for text in counts):
        return 0.0
    total = counts.total()
    cells = [[0.0, 0.0]]
    for text in sorted(probs):
        if cells[-1][1] >= 5.0:
            cells.append([0.0, 0.0])
        cells[-1][0] += counts[text]
        cells[-1][1] += probs[text] * total
    if len(cells) > 1 and cells[-1][1] < 5.0:
        seen, expected = cells.pop()
        cells[-1][0] += seen
        cells[-1][1] += expected
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(chi2.sf(statistic, len(cells) - 1)) if len(cells) > 1 else 1.0


def last_tokens_p_value(texts: Iterable[Text], probs: dict[Text, float], count: int) -> float:
    marginal: dict[Text, float] = {}
    for text, prob in probs.items():
        marginal[text[-count:]] = marginal.get(text[-count:], 0.0) + prob
    return p_value([text[-count:] for text in texts], marginal)


def plain_texts(target: Tensor, sampling: Sampling, keys: Sequence[int], length: int) -> list[Text]:
    texts: list[Text] = [()] * len(keys)
    for _ in range(length):
        rows = [row(sampling, text, noise_key=key) for text, key in zip(texts, keys, strict=True)]
        tokens = choose(process(logits_of(target, rows), rows), rows).tolist()
        texts = [(*text, token) for text, token in zip(texts, tokens, strict=True)]
    return texts


def coupled_texts(
    target: Tensor,
    draft: Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    length: int,
    depth: int,
    width: int,
    unite: Callable[[int, Text, Draft], Draft] = lambda run, text, tree: tree,
) -> list[Text]:
    """Texts by rounds of coupled verification; width 1 drafts chains, above it complete trees.

    unite: returns what is judged in the place of a run's tree after a text.
    """
    texts: list[Text] = [()] * len(keys)
    while unfinished := [run for run, text in enumerate(texts) if len(text) < length]:
        trees = _trees(draft, sampling, [(keys[run], texts[run]) for run in unfinished], depth, width)
        drafts = [unite(run, texts[run], tree) for run, tree in zip(unfinished, trees, strict=True)]
        rows = [
            row(sampling, texts[run], _tokens(tree, node), keys[run])
            for run, tree in zip(unfinished, drafts, strict=True)
            for node in range(ROOT, len(tree))
        ]
        chosen = iter(choose(process(logits_of(target, rows), rows), rows).tolist())
        for run, tree in zip(unfinished, drafts, strict=True):
            verdict = verify_coupled(tree, [next(chosen) for _ in range(len(tree) + 1)])
            texts[run] += verdict.tokens
    return [text[:length] for text in texts]


def ratio_texts(
    target: Tensor,
    draft: Tensor,
    sampling: Sampling,
    keys: Sequence[int],
    length: int,
    depth: int,
    verify: Rule,
    draw: Draws = sample_draft_token,
) -> tuple[list[Text], list[int]]:
    """Texts by rounds of an opt-in rule over chains, and how many drafted tokens each round accepted."""

    @cache
    def draft_row(text: Text, path: Text) -> Tensor:
        rows = [row(sampling, text, path)]
        return process(logits_of(draft, rows), rows)[0]

    @cache
    def target_probs(text: Text, path: Text) -> Tensor:
        rows = [row(sampling, text, path[:reached]) for reached in range(len(path) + 1)]
        return probabilities(process(logits_of(target, rows), rows))

    texts, accepted = [], []
    for key in keys:
        text: Text = ()
        number = 0
        while len(text) < length:
            position = len(PROMPT) + len(text)
            path: Text = ()
            draft_probs: list[SparseProbs] = []
            while len(path) < depth:
                token, probs = draw(draft_row(text, path), key, position + len(path), number)
                path, draft_probs = (*path, token), [*draft_probs, probs]
            chain = Draft.chain(path, draft_probs)
            verdict = verify(chain, target_probs(text, path), key, position, number)
            text += verdict.tokens
            accepted.append(len(verdict.accepted))
            number += 1
        texts.append(text[:length])
    return texts, accepted


def _trees(
    draft: Tensor, sampling: Sampling, runs: Sequence[tuple[int, Text]], depth: int, width: int
) -> list[Draft]:
    trees = [Draft() for _ in runs]
    frontiers = [[ROOT] for _ in runs]
    for _ in range(depth):
        rows = [
            row(sampling, text, _tokens(tree, node), key)
            for (key, text), tree, frontier in zip(runs, trees, frontiers, strict=True)
            for node in frontier
        ]
        best = iter(gumbel_max(process(logits_of(draft, rows), rows), rows, width)[0].tolist())
        for run, frontier in enumerate(frontiers):
            grown = [(node, token) for node in frontier for token in next(best)]
            tree = trees[run]
            frontiers[run] = list(range(len(tree), len(tree) + len(grown)))
            tokens = (*tree.tokens, *(token for _, token in grown))
            trees[run] = Draft(tokens, (*tree.parents, *(node for node, _ in grown)))
    return trees


def _tokens(tree: Draft, node: int) -> Text:
    return tuple(tree.tokens[step] for step in tree.path(node))


def adversarial_pairs(vocab_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs of target and draft at which rules break."""
    uniform = torch.zeros(vocab_size, vocab_size)
    first_half = uniform.clone()
    first_half[:, vocab_size // 2 :] = -40.0
    sure = torch.eye(vocab_size).roll(1, dims=1) * 40.0
    nearly_uniform = torch.tensor([[1e-6 * token for token in range(vocab_size)]] * vocab_size)
    only_zero = uniform.clone()
    only_zero[:, 0] = 3.0
    return {
        "random": (random_model(vocab_size, 1), random_model(vocab_size, 2)),
        "close": (
            random_model(vocab_size, 1),
            random_model(vocab_size, 1) + random_model(vocab_size, 3, 0.3),
        ),
        "equal": (random_model(vocab_size, 4), random_model(vocab_size, 4)),
        "disjoint supports": (first_half, first_half.flip(1)),
        "one-hot draft": (random_model(vocab_size, 5), sure),
        "one-hot target": (sure, random_model(vocab_size, 6)),
        "near-ties": (nearly_uniform, nearly_uniform.flip(1)),
        "token 0": (only_zero, uniform),
    }
