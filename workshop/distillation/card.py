"""The model card of a fitted drafter."""

from workshop.distillation.distil import Distilled
from workshop.distillation.held_out import AcceptanceTally
from workshop.distillation.settings import DistilSettings
from workshop.training.card import FOR_ONE

NAME = "README.md"
NOT_TOLD = {"draft", "threads", "learning_rate"}
CARD = """\
# {title}, fitted

Made by `outrider distil` for the target `{target}`{began}. {size:,} weights were trained, and are stored in \
bfloat16. {for_one}

**Data.** {texts:,} texts of {tokens:,} tokens: {source}. Token ids alone were read.

**Recipe.** KL + 2 × total variation to the target, whose distributions were computed again for each batch. \
{steps} steps were taken, and the weights are those after step {best_step}:

- learning_rate: {learning_rate:g}
{settings}

**Acceptance** on held-out prompts, before and after: accepted / reached under coupled verification, at the \
temperatures of their answers{positions}.

{table}
"""
SOURCES = {
    "prompts": "prompts from a file, and what the target answers to them",
    "recorded": "recorded traffic",
}


def card(distilled: Distilled, settings: DistilSettings, target: str, source: str) -> str:
    """Returns the card in Markdown.

    source: a key of SOURCES.
    """
    told = settings.model_dump(mode="json", exclude=NOT_TOLD, exclude_none=True)
    has_positions = any(len(tally.rates) > 1 for tally in distilled.after.values())
    return CARD.format(
        for_one=FOR_ONE,
        title=distilled.title,
        target=target,
        began=f", of `{settings.draft}`" if settings.draft else "",
        size=distilled.size,
        texts=distilled.texts,
        tokens=distilled.tokens,
        source=SOURCES[source],
        steps=distilled.steps,
        best_step=distilled.best_step,
        learning_rate=distilled.learning_rate,
        settings="\n".join(f"- {name}: {value}" for name, value in told.items()),
        positions=", position by position" if has_positions else "",
        table=acceptance_table(distilled),
    )


def acceptance_table(distilled: Distilled) -> str:
    """Returns the table of acceptance by task, in Markdown."""
    lines = ["| task | texts | before | after |", "|---|---|---|---|"]
    lines += [
        f"| {task} | {tally.texts} | {_rates(distilled.before[task])} | {_rates(tally)} |"
        for task, tally in distilled.after.items()
    ]
    return "\n".join(lines)


def _rates(tally: AcceptanceTally) -> str:
    return " / ".join(f"{rate:.2f}" for rate in tally.rates)
