"""What is trained on and what is held out share no prompt."""

import pytest

from gateway.recorded_answers import RecordedAnswer
from workshop.advice.answers import Prompt
from workshop.distillation.questions import HELD_OUT_EVERY, of_prompts, split
from workshop.distillation.settings import DistilSettings


def asked(task: str | None, *prompts: int) -> list[RecordedAnswer]:
    return [RecordedAnswer(prompt=(prompt,), answer=(9,), temperature=1.0, task=task) for prompt in prompts]


def test_split_puts_no_prompt_into_both_parts() -> None:
    questions = asked("chat", *([1, 2, 3, 4] * 10), *range(10, 50)) + asked("code", *range(60, 80))
    training, held_out = split(questions, DistilSettings())
    judged = [question.prompt for question in held_out]
    assert len(judged) == len({*judged}) > 5
    assert not {question.prompt for question in training} & {*judged}
    assert {question.prompt for question in (*training, *held_out)} == {
        question.prompt for question in questions
    }
    assert {question.task for question in held_out} == {"chat", "code"}


def test_split_drops_the_answers_of_held_out_prompts() -> None:
    training, held_out = split(asked(None, *range(20)), DistilSettings())
    assert all(question.answer == () for question in held_out)
    assert all(question.answer == (9,) for question in training)


def test_split_holds_out_a_share_of_each_task_up_to_the_limit() -> None:
    questions = asked("many", *range(800)) + asked("few", *range(800, 800 + 2 * HELD_OUT_EVERY))
    _, held_out = split(questions, DistilSettings(held_out=6))
    assert sorted(question.task or "" for question in held_out) == ["few"] * 2 + ["many"] * 4


def test_split_repeats_with_the_seed_and_differs_with_another() -> None:
    questions = asked(None, *range(100))
    divided = [split(questions, DistilSettings(seed=seed)) for seed in (1, 1, 2)]
    assert divided[0] == divided[1] != divided[2]


@pytest.mark.parametrize("prompts", [[], [1], [1, 1, 1]])
def test_split_of_too_few_prompts_is_refused(prompts: list[int]) -> None:
    with pytest.raises(ValueError, match=f"^{len(prompts)} requests with too few different prompts"):
        split(asked("chat", *prompts), DistilSettings())


def test_temperatures_take_turns_over_the_prompts_of_a_file() -> None:
    prompts = [Prompt("all", (1,)), Prompt("chat", (2,)), Prompt("chat", (3,))]
    questions = of_prompts(prompts, DistilSettings(temperatures=(0.7, 0.0), texts=2))
    assert [(question.task, question.temperature, question.answer) for question in questions] == [
        (None, 0.7, ()),
        ("chat", 0.0, ()),
    ]
