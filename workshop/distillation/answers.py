"""Generates the target's missing answers and writes each batch at once, so that a crash loses little."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.recorded_answers import RecordedAnswer, read_file, whole_lines
from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from workshop.distillation.settings import DistilSettings
from workshop.memory import free_memory


def answer_all(
    questions: Sequence[RecordedAnswer],
    file: Path,
    target: EngineSettings,
    settings: DistilSettings,
    tell: Callable[[str], None],
) -> list[RecordedAnswer]:
    """Returns all answers, in the order of their questions. Answers that are in the file are kept.

    Raises:
        EngineError: the target cannot be run.
    """
    done = _cut_to_whole_lines(file)
    if done < len(questions):
        engine = Engine.from_settings(target)
        try:
            _write(questions, done, file, engine, settings, tell)
        finally:
            engine.shut_down()
            del engine
            free_memory()
    return read_file(file)


def _write(
    questions: Sequence[RecordedAnswer],
    done: int,
    file: Path,
    engine: Engine,
    settings: DistilSettings,
    tell: Callable[[str], None],
) -> None:
    started, at_once, written = time.monotonic(), engine.settings.max_sequences, 0
    with file.open("a") as answers:
        for first in range(done, len(questions), at_once):
            part = questions[first : first + at_once]
            found = _answered(part, engine, settings)
            answers.writelines(answer.line() for answer in found)
            answers.flush()
            written += sum(len(answer.answer) for answer in found)
            speed = written / (time.monotonic() - started)
            tell(f"answers: {first + len(part)} of {len(questions)}, {speed:.0f} tokens/s")


def _answered(
    questions: Sequence[RecordedAnswer], engine: Engine, settings: DistilSettings
) -> list[RecordedAnswer]:
    asked = {
        index: OfflineRequest(
            question.prompt, _sampling(question, engine, settings), key_of(question, settings)
        )
        for index, question in enumerate(questions)
        if not question.answer and len(question.prompt) + 2 <= engine.max_length
    }
    outputs = dict(zip(asked, generate(engine, None, list(asked.values()), 0), strict=True))
    return [
        question.model_copy(update={"answer": outputs[index].tokens}) if index in outputs else question
        for index, question in enumerate(questions)
    ]


def _sampling(question: RecordedAnswer, engine: Engine, settings: DistilSettings) -> Sampling:
    room = engine.max_length - len(question.prompt)
    return Sampling(
        temperature=question.temperature, max_tokens=min(settings.tokens, room), seed=settings.seed
    )


def key_of(question: RecordedAnswer, settings: DistilSettings) -> int:
    """Returns the noise key under which the target answers a question."""
    return noise_key(settings.seed, 0, question.prompt)


def _cut_to_whole_lines(file: Path) -> int:
    """Truncates the file after its last whole line and returns the number of lines."""
    if not file.exists():
        return 0
    lines = whole_lines(file.read_bytes())
    with file.open("r+b") as cut:
        cut.truncate(sum(map(len, lines)))
    return len(lines)
