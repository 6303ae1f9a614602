"""What a candidate is judged to bring is what rounds with it then bring, round for round."""

from functools import cache, partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from outrider.demo.prompts import DEMO
from outrider.drafters.ngram import NgramIndex
from outrider.drafters.past_answers import PastAnswers, Scope
from outrider.drafters.suffix import SuffixIndex
from outrider.engine.colocated.draft_model import DraftModel
from outrider.engine.offline.index import IndexDrafter
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.learning.agreement import agreement
from tests.support.demo_pair import engine, prompt_of
from tests.support.eagle3 import write_eagle3
from tests.support.heads import write_medusa
from tests.support.target_drafters import KINDS, TOKENS, drafted_texts, engine_with
from workshop.advice.answers import Prompt, TargetAnswer, answered, by_task, read_prompts
from workshop.advice.judged import FIRST, DraftStart, JudgedAnswer, counted
from workshop.advice.judging import judge_index, judge_starts, judge_suffix, judge_text
from workshop.advice.target_drafter import TargetDrafterJudge

DEPTH = 8
SEED = 1
TEXTS = ("code", "json", "question_answer")


@cache
def answers(temperature: float = 0.7, tokens: int = 32, kinds: tuple[str, ...] = TEXTS) -> list[TargetAnswer]:
    prompts = [Prompt(kind, prompt_of(kind)) for kind in kinds]
    return answered(engine("target"), prompts, temperature, tokens, SEED)


@cache
def of_draft(temperature: float) -> list[JudgedAnswer]:
    return judge_text(DraftModel(engine("draft")), answers(temperature), DEPTH)


def after_the_first(answer: TargetAnswer) -> OfflineRequest:
    """The same generation with its first token in the prompt, as after the prompt's pass."""
    given, limit = answer.request, answer.request.sampling.max_tokens - FIRST
    sampling = given.sampling.model_copy(update={"max_tokens": limit})
    return OfflineRequest((*given.prompt, *answer.tokens[:FIRST]), sampling, given.noise_key)


@pytest.mark.parametrize("depth", [1, DEPTH])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_models_rounds_are_foretold_exactly(temperature: float, depth: int) -> None:
    asked = [after_the_first(answer) for answer in answers(temperature)]
    outputs = generate(engine("target"), DraftModel(engine("draft")), asked, depth)
    counts = counted(of_draft(temperature), depth)
    assert counts.rounds == sum(output.target_passes for output in outputs)
    assert counts.tokens == sum(len(output.tokens) for output in outputs)
    assert sum(counts.accepted) == sum(output.accepted for output in outputs) > 10


def test_guesses_one_by_one_say_what_a_draft_before_every_token_says() -> None:
    every = judge_starts(DraftModel(engine("draft")), answers(0.7), DEPTH)
    assert [[start.correct for start in judged.starts] for judged in every] == [
        [start.correct for start in judged.starts] for judged in of_draft(0.7)
    ]


def test_indexs_rounds_are_foretold_exactly() -> None:
    judged = judge_index(NgramIndex, answers(), DEPTH)
    asked = [after_the_first(answer) for answer in answers()]
    outputs = generate(engine("target"), IndexDrafter(NgramIndex), asked, 4)
    assert counted(judged, 4).rounds == sum(output.target_passes for output in outputs)


def test_suffixes_are_found_in_the_past_answers_of_their_task() -> None:
    twice = [*answers(), *answers()]
    alone = counted(judge_suffix(twice, DEPTH, past_tokens=0), DEPTH)
    remembered = counted(judge_suffix(twice, DEPTH, past_tokens=2**12), DEPTH)
    assert remembered.tokens_per_pass > 1.5 * alone.tokens_per_pass
    past = PastAnswers(2**12)
    for answer in answers():
        past.add(Scope("", answer.task), answer.tokens)
    rounds = 0
    for answer in answers():
        scope = Scope("", answer.task)
        index = IndexDrafter(partial(SuffixIndex, past, scope))
        (output,) = generate(engine("target"), index, [after_the_first(answer)], DEPTH)
        rounds += output.target_passes
    second = judge_suffix(twice, DEPTH, past_tokens=2**12)[len(TEXTS) :]
    assert counted(second, DEPTH).rounds == rounds


def head_in(folder: Path, name: str) -> Path | None:
    """A checkpoint for the drafter, if it has one."""
    match name:
        case "medusa":
            return write_medusa(folder / name)
        case "eagle3":
            return write_eagle3(folder / name)
        case _:
            return None


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("name", ["medusa", "eagle3", "early_exit"])
def test_drafts_beside_the_target_are_those_of_serving(name: str, tmp_path: Path) -> None:
    head, depth = head_in(tmp_path, name), 3
    layers = {"layers": 4} if name == "early_exit" else {}
    target = engine_with(name, head, layers, self_check=False)
    served = drafted_texts(target, 0.7, depth, len(KINDS), ignore_eos=False)
    prompts = [Prompt(kind, prompt_of(kind)) for kind in KINDS]
    given = answered(engine("target"), prompts, 0.7, TOKENS, SEED)
    assert [text.tokens for text in served] == [answer.tokens for answer in given]
    judge = TargetDrafterJudge(target.settings)
    judged = judge.judge(given, depth)
    for answer, found, text in zip(given, judged, served, strict=True):
        for draft, length in zip(text.drafts, text.lengths, strict=True):
            place = length - len(answer.request.prompt)
            assert found.starts[place] == DraftStart(
                len(draft), agreement(draft.tokens, answer.tokens[place:]).correct
            )
    assert sum(len(text.drafts) for text in served) == counted(judged, depth).rounds
    assert judge.steps.seconds(1, 1) > 0.0


def test_prompts_are_read_with_their_labels_and_chats_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "def f(", "task": "code"}\n\n{"messages": [{"role": "user", "content": "Hello"}]}\n'
    )
    code, chat = read_prompts(file, tokenizer)
    assert (code.task, tokenizer.decode(code.tokens)) == ("code", "def f(")
    assert (chat.task, tokenizer.decode(chat.tokens)) == ("all", "<|user|>Hello<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ('{"prompt": 3}', "prompts.jsonl:1: prompt: Input should be a valid string"),
        ('{"prompt": "a", "labels": "b"}', "prompts.jsonl:1: labels: Extra inputs"),
        ('{"prompt": "a"}\n{"task": "b"}', "prompts.jsonl:2: line: .*either prompt or messages"),
        ('{"prompt": ""}', "prompts.jsonl:1: the prompt has no tokens"),
    ],
)
def test_line_that_is_not_accepted_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_prompts(file, AutoTokenizer.from_pretrained(DEMO / "target"))


def test_prompts_without_room_for_an_answer_are_left_out() -> None:
    target = engine("target")
    long = Prompt("code", (5,) * (target.max_length - 1))
    assert answered(target, [long, Prompt("json", prompt_of("json"))], 0.0, 4, SEED)[0].task == "json"


def test_answers_are_told_apart_by_their_task() -> None:
    assert [(task, len(some)) for task, some in by_task([*answers(), *answers()])] == [
        (kind, 2) for kind in TEXTS
    ]
