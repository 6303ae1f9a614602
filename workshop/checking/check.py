"""Runs the parts of a check of two deployments, one after the other."""

import asyncio
import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from workshop.checking import lm_eval
from workshop.checking.at_once import Progress, all_of
from workshop.checking.deployment import CheckedText, Deployment
from workshop.checking.errors import CheckError, RefusedError
from workshop.checking.paired import paired
from workshop.checking.prompts import read_prompts, read_text
from workshop.checking.report import CheckReport, Distributions, KindCount, Perplexity, Seeded, Side, Tasks
from workshop.checking.settings import CheckSettings, Kind
from workshop.checking.side_by_side import AnswerPair, compared, near_ties_p_value
from workshop.checking.two_sample import two_sample_test

# request fields of each kind
KINDS: dict[Kind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "presence_penalty": 0.5},
    "json": {"temperature": 1.0, "response_format": {"type": "json_object"}},
}
LIKELIEST = 20  # log-probabilities per position, the most that servers allow
CHOICES = 16  # texts drawn by one request
SMALLEST_P = 1e-9  # smaller p-values are printed as "below this value"
PIECE = 2000  # characters of a text that are scored by one request

T = TypeVar("T")


async def check(a: Deployment, b: Deployment, settings: CheckSettings, progress: Progress) -> CheckReport:
    """Runs all parts of a check, or the paired runs alone. Raises CheckError if a part fails."""
    started = time.monotonic()
    await asyncio.gather(a.connect(), b.connect())
    sides = Side(a.name, a.url, a.model, a.mode), Side(b.name, b.url, b.model, b.mode)
    if settings.paired is not None:
        effect = await paired(a, b, settings, progress)
        return CheckReport(sides, settings, time.monotonic() - started, paired=effect)
    prompts = read_prompts(settings.prompts)
    texts = prompts if settings.text is None else _pieces(read_text(settings.text))
    both = _Both(a, b, settings, progress)
    return CheckReport(
        sides=sides,
        settings=settings,
        seeded=await both.seeded(prompts) if settings.requests else None,
        distributions=await both.distributions(prompts) if settings.samples else None,
        perplexity=await both.perplexity(texts),
        tasks=await both.tasks() if settings.tasks else None,
        seconds=time.monotonic() - started,
    )


class _Both:
    """Sends requests to both deployments, several at a time."""

    def __init__(self, a: Deployment, b: Deployment, settings: CheckSettings, progress: Progress) -> None:
        self._a, self._b = a, b
        self._settings = settings
        self._progress = progress

    async def seeded(self, prompts: Sequence[str]) -> Seeded:
        settings = self._settings

        async def pair(number: int) -> AnswerPair:
            kind = settings.kinds[number % len(settings.kinds)]
            prompt = prompts[number // len(settings.kinds) % len(prompts)]
            asked = {"max_tokens": settings.answer_tokens, "seed": settings.seed + number, **KINDS[kind]}
            a, b = await self._of_both(
                lambda deployment: _answer(deployment, prompt, logprobs=LIKELIEST, **asked)
            )
            return compared(number, kind, a, b, settings.tolerance)

        pairs = await self._all("seeded requests", [pair] * settings.requests)
        differences = tuple(pair.difference for pair in pairs if pair.difference)
        tokens, p_value = sum(pair.compared for pair in pairs), near_ties_p_value(pairs)
        largest = max(pair.largest for pair in pairs)
        clear = sum(not difference.is_near_tie for difference in differences)
        near_ties = len(differences) - clear
        reasons = []
        if clear:
            reasons.append(f"{clear} of {len(pairs)} seeded answers differ at a token that is no near-tie")
        if p_value < settings.false_alarm:
            reasons.append(
                f"{near_ties} of {len(pairs)} seeded answers part at near-ties, more than rounding explains"
                f" ({_p(p_value)})"
            )
        reasons += self._of_rounding(largest, "seeded answers")
        kinds = tuple(_count(kind, pairs) for kind in dict.fromkeys(pair.kind for pair in pairs))
        mean = sum(pair.rounding for pair in pairs) / max(tokens, 1)
        return Seeded(kinds, tokens, mean, largest, near_ties, p_value, differences, tuple(reasons))

    async def distributions(self, prompts: Sequence[str]) -> Distributions:
        """Compares sampled texts. Each request has its own seed, so the texts are independent."""
        settings = self._settings
        prompts = prompts[: settings.sampled_prompts]
        starts = range(0, settings.samples, CHOICES)
        rule = {} if settings.verification == "coupled" else {"verification": settings.verification}

        async def drawn(number: int) -> tuple[list[CheckedText], list[CheckedText]]:
            prompt, start = prompts[number // len(starts)], starts[number % len(starts)]
            asked = {
                "max_tokens": settings.sampled_tokens,
                "temperature": settings.temperature,
                "n": min(CHOICES, settings.samples - start),
                "logprobs": 0,
                "speculation": rule,
            }
            seed = settings.seed + 2 * number
            return await self._of_both(
                lambda deployment: deployment.complete(prompt, seed=seed + (deployment is self._b), **asked)
            )

        parts = await self._all("draws", [drawn] * (len(prompts) * len(starts)))
        samples = []
        for first in range(0, len(parts), len(starts)):
            of_prompt = parts[first : first + len(starts)]
            a, b = ([text.tokens for part in of_prompt for text in part[side]] for side in (0, 1))
            samples.append((a, b))
        test = await asyncio.to_thread(two_sample_test, samples, settings.false_alarm, settings.seed)
        reasons: tuple[str, ...] = ()
        if test.p_value <= settings.false_alarm:
            reasons = (
                f"texts drawn at temperature {settings.temperature:g} have another distribution"
                f" ({_p(test.p_value)})",
            )
        return Distributions(
            len(prompts),
            settings.samples,
            settings.sampled_tokens,
            settings.temperature,
            settings.verification,
            test,
            reasons,
        )

    async def perplexity(self, texts: Sequence[str]) -> Perplexity:
        async def scored(number: int) -> tuple[CheckedText, CheckedText]:
            return await self._of_both(lambda deployment: deployment.score(texts[number]))

        pairs = await self._all("scored texts", [scored] * len(texts))
        if any(a.tokens != b.tokens for a, b in pairs):
            reason = "a text has other tokens at A than at B"
            return Perplexity(len(texts), 0, 0.0, 0.0, 0.0, 0.0, (reason,))
        logprobs = [
            both for a, b in pairs for both in zip(a.logprobs[1:], b.logprobs[1:], strict=True)
        ]  # the first token has no log-probability
        if not logprobs:
            raise CheckError("text: one of at least two tokens is needed")
        moved = [abs(left - right) for left, right in logprobs]
        a, b = (_perplexity([both[side] for both in logprobs]) for side in (0, 1))
        reasons = self._of_rounding(max(moved), "the scored text")
        return Perplexity(len(texts), len(moved), a, b, sum(moved) / len(moved), max(moved), tuple(reasons))

    async def tasks(self) -> Tasks:
        """Runs lm-eval at A, then at B, because lm-eval itself sends concurrent requests."""
        settings, metrics = self._settings, []
        for number, task in enumerate(settings.tasks):
            scores = []
            for side in (self._a, self._b):
                self._progress(f"{task} at {side.name}", number, len(settings.tasks))
                with tempfile.TemporaryDirectory() as folder:
                    scores.append(await lm_eval.scores(side, task, settings, Path(folder)))
            metrics += lm_eval.compared(task, *scores)
        self._progress("tasks", len(settings.tasks), len(settings.tasks))
        reasons = [
            f"{metric.task}: {metric.metric} is {metric.a:.4g} at A and {metric.b:.4g} at B"
            f" ({_p(metric.p_value)})"
            for metric in metrics
            if metric.p_value <= settings.false_alarm
        ]
        return Tasks(tuple(metrics), tuple(reasons))

    def _of_rounding(self, largest: float, where: str) -> list[str]:
        if largest <= self._settings.tolerance:
            return []
        return [
            f"log-probabilities of {where} differ by up to {largest:.2g} nats, while"
            f" {self._settings.tolerance:g} count as rounding"
        ]

    async def _of_both(self, asked: Callable[[Deployment], Awaitable[T]]) -> tuple[T, T]:
        return await asyncio.gather(asked(self._a), asked(self._b))

    async def _all(self, what: str, jobs: Sequence[Callable[[int], Awaitable[T]]]) -> list[T]:
        return await all_of(what, jobs, self._settings.concurrency, self._progress)


async def _answer(deployment: Deployment, prompt: str, **asked: Any) -> CheckedText:
    """Returns the answer or the refusal. A refusal by only one deployment is a difference."""
    try:
        (text,) = await deployment.complete(prompt, **asked)
    except RefusedError as error:
        return CheckedText((), (), (), None, refusal=str(error))
    return text


def _count(kind: Kind, pairs: Sequence[AnswerPair]) -> KindCount:
    own = [pair for pair in pairs if pair.kind == kind]
    return KindCount(kind, len(own), sum(pair.difference is None for pair in own))


def _p(value: float) -> str:
    return f"p = {value:.1g}" if value >= SMALLEST_P else f"p < {SMALLEST_P:g}"


def _perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def _pieces(text: str) -> list[str]:
    """Cuts a text into pieces, each short enough for one request."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    if not pieces:
        raise CheckError("text: the file is empty")
    return pieces
