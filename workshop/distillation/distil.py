"""Runs a distillation: questions, answers, training, a checkpoint with its card.

Unfinished work is in the folder ``unfinished`` of the output, so that a killed distillation can resume.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from gateway.recorded_answers import RecordedAnswer, read_file
from outrider.engine.loading.download import WANTED
from outrider.engine.loading.weights import resolve_device
from outrider.engine.settings import EngineSettings
from workshop.advice.answers import UNLABELLED
from workshop.advice.judged import FIRST
from workshop.distillation.answers import answer_all, key_of
from workshop.distillation.held_out import AcceptanceTally, CoupledAcceptance, HeldOutText
from workshop.distillation.questions import split
from workshop.distillation.settings import DistilSettings
from workshop.distillation.trainees import options_of_kind, trainee_of, training_settings
from workshop.training.loop import PROGRESS, Training
from workshop.training.stream import Stream
from workshop.training.target import FrozenTarget

UNFINISHED = "unfinished"
QUESTIONS, ASKED, ANSWERS, TRAINING = "questions.jsonl", "asked.json", "answers.jsonl", "training"
READ_TOKENS = 1024  # last tokens of a held-out text that are read
HEADS = ("eagle3", "dflash", "medusa")  # drafters that are trained without an initial checkpoint


@dataclass(frozen=True)
class Distilled:
    """Result of a distillation."""

    title: str  # title of the trained drafter
    size: int  # weights that were trained
    texts: int  # texts that were trained on
    tokens: int  # tokens of these texts, prompts included
    steps: int  # steps that were taken
    best_step: int  # step whose weights are written
    learning_rate: float
    before: dict[str, AcceptanceTally]  # tallies by task
    after: dict[str, AcceptanceTally]


class Distillation:
    """Distillation of one drafter, for one target."""

    def __init__(
        self,
        target: EngineSettings,
        settings: DistilSettings,
        out: Path,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Checks the output folder and the draft.

        Args:
            target: settings of the engine that generates answers.
            settings: name the draft to begin with, unless a head is trained.
            tell: called with a line of progress.

        Raises:
            ValueError: the output folder has other content, or the drafter needs a draft, or takes none.
        """
        self._engine, self._settings, self._out, self._tell = target, settings, out, tell
        self._unfinished = out / UNFINISHED
        if out.exists() and any(out.iterdir()) and not self._unfinished.exists():
            raise ValueError(f"out={str(out)!r} is not empty: name a folder that is new")
        if settings.drafter not in HEADS and settings.draft is None:
            raise ValueError("draft: the deployment has none to begin with, so name a checkpoint")
        if settings.drafter in HEADS and settings.draft is not None:
            raise ValueError(
                f"draft={settings.draft!r} is for a draft model, and drafter={settings.drafter} begins "
                "without a checkpoint"
            )

    def run(self, source: str, read: Callable[[], list[RecordedAnswer]]) -> Distilled:
        """Runs the distillation and writes the checkpoint.

        Args:
            source: name of the questions; an unfinished distillation resumes with the same source only.
            read: returns the questions; called when a distillation begins, not when it resumes.

        Raises:
            EngineError: the target cannot be run, or the draft does not fit it.
            ValueError: there is too little to train on, or the folder has another unfinished distillation.
        """
        settings, unfinished = self._settings, self._unfinished
        folder = _local(self._engine.model)
        draft = None if settings.draft is None else _local(settings.draft)
        of_kind = options_of_kind(settings, folder, draft)
        held_out, questions = self._questions(source, read)
        of_training = training_settings(
            settings, of_kind, folder, unfinished / QUESTIONS, unfinished / TRAINING
        )
        answers = answer_all(
            [*held_out, *questions], unfinished / ANSWERS, self._engine, settings, self._tell
        )
        texts = [[*answer.prompt, *answer.answer] for answer in answers[len(held_out) :]]
        judge = CoupledAcceptance(
            self._judged(answers[: len(held_out)], of_training.depth), READ_TOKENS, of_training.depth
        )
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        torch.manual_seed(settings.seed)
        target = FrozenTarget(folder, resolve_device(self._engine.device))
        trainee = trainee_of(of_training, target)
        training = Training(trainee, target, of_training, judge)
        size, before = trainee.size, judge.by_task(trainee, target)
        training.run(Stream.of(texts))
        trainee.finalize()
        distilled = Distilled(
            title=trainee.title,
            size=size,
            texts=len(texts),
            tokens=sum(map(len, texts)),
            steps=training.steps,
            best_step=training.best_step,
            learning_rate=of_training.learning_rate,
            before=before,
            after=judge.by_task(trainee, target),
        )
        trainee.save(self._out)
        shutil.copy(unfinished / TRAINING / PROGRESS, self._out / PROGRESS)
        return distilled

    def finish(self) -> None:
        """Removes unfinished work, which contains tokens of the traffic, after everything was written."""
        shutil.rmtree(self._unfinished)

    def _questions(
        self, source: str, read: Callable[[], list[RecordedAnswer]]
    ) -> tuple[list[RecordedAnswer], list[RecordedAnswer]]:
        """Returns questions that are held out, and questions to train on."""
        asked = {
            "target": self._engine.model,
            "source": source,
            **self._settings.model_dump(mode="json", exclude={"threads"}),
        }
        file, note = self._unfinished / QUESTIONS, self._unfinished / ASKED
        if note.exists():
            known = json.loads(note.read_text())
            count = known.pop("questions held out")
            if known != asked:
                changed = ", ".join(name for name in asked if known.get(name) != asked[name])
                raise ValueError(
                    f"out={str(self._out)!r} has an unfinished distillation with another {changed}: give the "
                    f"same, or remove {str(self._unfinished)!r}"
                )
            self._tell("goes on with what is unfinished")
            questions = read_file(file)
            return questions[:count], questions[count:]
        training, held_out = split(read(), self._settings)
        self._unfinished.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text("".join(question.line() for question in (*held_out, *training)))
        _write_whole(note, {**asked, "questions held out": len(held_out)})
        return held_out, training

    def _judged(self, answers: Sequence[RecordedAnswer], depth: int) -> list[HeldOutText]:
        """Returns held-out texts that are long enough to be judged. Raises ValueError if there are none."""
        texts = [
            HeldOutText(
                (*answer.prompt, *answer.answer),
                len(answer.prompt),
                key_of(answer, self._settings),
                answer.temperature,
                answer.task or UNLABELLED,
            )
            for answer in answers
            if len(answer.answer) > FIRST + 1 and len(answer.prompt) + len(answer.answer) > depth + FIRST
        ]
        if not texts:
            raise ValueError("no held-out prompt has an answer of three tokens: give other prompts")
        return texts


def _write_whole(file: Path, content: Any) -> None:
    """Writes a file atomically."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, file)


def _local(model: str) -> Path:
    """Returns the folder of a checkpoint, downloaded if it is a hub id. Raises ValueError or OSError."""
    return Path(model) if Path(model).is_dir() else Path(snapshot_download(model, allow_patterns=WANTED))
