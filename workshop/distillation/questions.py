"""Questions that a draft is fitted to: prompts from a file, or recorded traffic. A part is held out."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from random import Random

from gateway.recorded_answers import RecordedAnswer
from workshop.advice.answers import UNLABELLED, Prompt
from workshop.distillation.settings import DistilSettings

HELD_OUT_EVERY = 8  # one in this number of distinct prompts of a task is held out, up to the wanted number


def of_prompts(prompts: Sequence[Prompt], settings: DistilSettings) -> list[RecordedAnswer]:
    """Returns prompts as questions without answers; the temperatures are used in turn."""
    return [
        RecordedAnswer(
            prompt=prompt.tokens,
            answer=(),
            temperature=settings.temperatures[number % len(settings.temperatures)],
            task=None if prompt.task == UNLABELLED else prompt.task,
        )
        for number, prompt in enumerate(prompts[: settings.texts])
    ]


def split(
    questions: Sequence[RecordedAnswer], settings: DistilSettings
) -> tuple[list[RecordedAnswer], list[RecordedAnswer]]:
    """Returns questions to train on and held-out questions; no prompt is in both or held out twice.

    Held-out questions lose their answers: the target answers them again, under known keyed noise.

    Raises:
        ValueError: there are too few distinct prompts.
    """
    order = list(questions)
    Random(settings.seed).shuffle(order)
    by_task: dict[str | None, dict[tuple[int, ...], RecordedAnswer]] = {}
    for question in order:
        by_task.setdefault(question.task, {}).setdefault(question.prompt, question)
    shares = [list(distinct.values())[::HELD_OUT_EVERY] for distinct in by_task.values() if len(distinct) > 1]
    in_turn = chain.from_iterable(zip_longest(*shares))  # one question of each task in turn
    held_out = [question for question in in_turn if question is not None][: settings.held_out]
    prompts = {question.prompt for question in held_out}
    training = [question for question in order if question.prompt not in prompts]
    if not training or not held_out:
        raise ValueError(
            f"{len(questions)} requests with too few different prompts: give 2 of a task at least, one to "
            "train on and one to judge on"
        )
    return training, [question.model_copy(update={"answer": ()}) for question in held_out]
