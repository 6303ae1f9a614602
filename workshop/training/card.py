"""The model card of a trained drafter."""

import json

from workshop.training.loop import DOES_NOT_MATTER, PROGRESS
from workshop.training.settings import TrainingSettings
from workshop.training.trainee import Trainee

FOR_ONE = "Of no use for another target."
CARD = """\
# {title}

For the target in `{target}`: {size:,} trained weights, stored in bfloat16. {for_one}

**Data.** {tokens:,} tokens: prompts, and what the target answers to them. One text in 32 is held out.

**Recipe.** `python -m workshop.training {command}` on KL + 2 × total variation to the target:

{settings}

**Acceptance** on the held-out text, as the sum of minima, which is the best that any rule could accept:

| {positions} |
|{line}
| {acceptance} |
"""


def write_card(trainee: Trainee, command: str, settings: TrainingSettings, tokens: int) -> None:
    """Writes README.md next to the checkpoint. tokens: number of tokens that were trained on."""
    *_, last = map(json.loads, (settings.output / PROGRESS).read_text().splitlines())
    acceptance = last["sum of minima"]
    told = settings.model_dump(mode="json", exclude={"target", "draft", "text", *DOES_NOT_MATTER})
    card = CARD.format(
        for_one=FOR_ONE,
        title=trainee.title,
        target=settings.target,
        size=trainee.size,
        tokens=tokens,
        command=command,
        positions=" | ".join(trainee.labels(len(acceptance))),
        line="---|" * len(acceptance),
        acceptance=" | ".join(f"{value:.2f}" for value in acceptance),
        settings="\n".join(f"- {name}: {value}" for name, value in told.items()),
    )
    (settings.output / "README.md").write_text(card)
