"""The demo draft fitted to text that neither demo model has seen: `python -m bench distil`.

By what `outrider distil` runs, twice: to consignment notes alone, and to these among prompts of the kinds
that the pair was trained on. Each draft is then judged by rounds of the engine on other prompts, of the new
kind and of the old ones. Acceptance and tokens per pass are counts. Time is that of the processor for a whole
distillation, the target's answers included.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from bench.drafting import Pair, asked_of, with_draft
from bench.report import save, table
from outrider.demo.prompts import DEMO, KINDS, prompts
from outrider.engine.settings import EngineSettings
from workshop.advice.answers import Prompt
from workshop.demo.consignments import KIND, consignments
from workshop.distillation.distil import Distillation
from workshop.distillation.questions import of_prompts
from workshop.distillation.settings import DistilSettings

TEMPERATURE = 0.7
LEARNING_RATE = 2e-3  # the demo draft is small
OLD_PROMPTS = 48  # that there are of each kind
JUDGING_SEED = 2  # of notes that nothing is fitted to
BEFORE, ALONE, AMONG_OLD = "before", "notes alone", "notes among all kinds"


def traffic(options: argparse.Namespace) -> Iterator[tuple[str, list[Prompt]]]:
    """What the draft is fitted to, by name: nothing that it is judged on."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))

    def read(task: str, texts: Sequence[str]) -> list[Prompt]:
        return [Prompt(task, tuple(tokenizer.encode(text).ids)) for text in texts]

    notes = read(KIND, consignments(options.texts))
    old = {kind: prompts(kind, OLD_PROMPTS)[options.prompts :] for kind in KINDS}
    yield ALONE, notes
    yield AMONG_OLD, notes + [one for kind, texts in old.items() for one in read(kind, texts)]


def fitted(name: str, asked: Sequence[Prompt], options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Writes the checkpoint. A row: what it took."""
    settings = DistilSettings(
        draft=str(DEMO / "draft"),
        tokens=options.tokens,
        steps=options.steps,
        learning_rate=LEARNING_RATE,
        threads=options.threads,
    )
    target = EngineSettings(
        model=str(DEMO / "target"), dtype="float32", threads=options.threads, cache_memory=2**28
    )
    begun = time.process_time()
    distillation = Distillation(target, settings, out, print)
    distilled = distillation.run(name, lambda: of_prompts(asked, settings))
    distillation.finish()
    return {
        "fitted to": name,
        "texts": distilled.texts,
        "tokens": distilled.tokens,
        "steps": distilled.steps,
        "best step": distilled.best_step,
        "processor, s": time.process_time() - begun,
    }


def judged(pair: Pair, kind: str, options: argparse.Namespace) -> dict[str, float]:
    texts = consignments(options.prompts, JUDGING_SEED) if kind == KIND else prompts(kind, options.prompts)
    tally = pair.tally(asked_of(texts, TEMPERATURE, options.tokens), options.depth)
    return {
        "acceptance": sum(tally.accepted) / max(sum(tally.reached), 1),
        "tokens per pass": tally.tokens_per_pass,
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench distil", description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=400, help="consignment notes to fit to")
    parser.add_argument("--steps", type=int, default=600, help="of the optimizer at most")
    parser.add_argument("--prompts", type=int, default=16, help="of each kind, to judge on")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    drafts, taken = {BEFORE: DEMO / "draft"}, []
    with TemporaryDirectory() as folder:
        for number, (name, asked) in enumerate(traffic(options)):
            drafts[name] = Path(folder) / str(number)
            taken.append(fitted(name, asked, options, drafts[name]))
            print(table(taken[-1:]), flush=True)
        pairs = {name: with_draft(draft) for name, draft in drafts.items()}
        rows = [
            {"kind": kind, "draft": name, **judged(pair, kind, options)}
            for kind in (KIND, *KINDS)
            for name, pair in pairs.items()
        ]
    print(table(rows))
    told = {"temperature": TEMPERATURE, "depth": options.depth, "prompts": options.prompts}
    print(save("distil", rows, threads=options.threads, taken=taken, **told))
