"""Runs tasks of lm-eval, if it is installed, at deployments and compares the scores by document."""

import asyncio
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from workshop.checking.deployment import COMPLETIONS, Deployment
from workshop.checking.errors import CheckError
from workshop.checking.settings import CheckSettings

PROGRAM = "lm_eval"
SAMPLES = "samples_*.jsonl"  # result files of lm-eval: one per task, one document per line

Scores = dict[str, dict[str, float]]  # scores by metric, then by document


@dataclass(frozen=True)
class TaskMetric:
    """Metric of a task at both deployments."""

    task: str
    metric: str
    documents: int
    a: float  # mean over documents
    b: float
    a_better: int  # documents whose value is higher at A
    b_better: int
    p_value: float  # probability of counts at least as uneven if neither deployment is better


def program() -> str:
    """Returns lm-eval's executable, beside this interpreter or on PATH. Raises CheckError."""
    beside = Path(sys.executable).parent / PROGRAM
    found = str(beside) if beside.is_file() else shutil.which(PROGRAM)
    if found is None:
        raise CheckError(f"tasks: {PROGRAM} is not installed; pip install 'lm-eval[api]' brings it")
    return found


async def scores(deployment: Deployment, task: str, settings: CheckSettings, folder: Path) -> Scores:
    """Runs a task and returns the scores of every document. Raises CheckError.

    folder: output folder of lm-eval.
    """
    if deployment.mode != "auto":
        raise CheckError("tasks: lm-eval names no mode of speculation, so it is compared as deployed: 'auto'")
    if settings.tokenizer is None:
        raise CheckError("tokenizer: lm-eval needs a folder or hub id")
    model = {
        "model": deployment.model,
        "base_url": f"{deployment.url}{COMPLETIONS}",
        "tokenizer": settings.tokenizer,
        "num_concurrent": settings.concurrency,
    }
    command = [program(), "run", "--model", "local-completions", "--tasks", task]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--seed", str(settings.seed), "--log_samples", "--output_path", str(folder)]
    if settings.task_folder is not None:
        command += ["--include_path", str(settings.task_folder)]
    if settings.task_limit is not None:
        command += ["--limit", str(settings.task_limit)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said = (await process.communicate())[0].decode(errors="replace")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise CheckError(f"{PROGRAM} failed with {task} at {deployment.name}: {said.strip()[-500:]}")
    found = sorted(folder.rglob(SAMPLES))
    if not found:
        raise CheckError(f"{PROGRAM} wrote no {SAMPLES} for {task} at {deployment.name}")
    return _read(found)


def _read(paths: Sequence[Path]) -> Scores:
    """Returns lm-eval's scores. A document is named by its file, without the date, and by its number."""
    scores: Scores = {}
    for path in paths:
        name = path.stem.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_text().splitlines():
            document: Mapping[str, Any] = json.loads(line)
            for metric in document["metrics"]:
                value = document.get(metric)
                if isinstance(value, int | float):
                    scores.setdefault(metric, {})[f"{name}/{document['doc_id']}"] = float(value)
    return scores


def compared(task: str, a: Scores, b: Scores) -> list[TaskMetric]:
    """Compares the scores. Raises CheckError if A and B have scores of different documents."""
    metrics = []
    for metric in sorted({*a, *b}):
        of_a, of_b = a.get(metric, {}), b.get(metric, {})
        if of_a.keys() != of_b.keys():
            raise CheckError(f"{task}: lm-eval scored other documents by {metric} at A than at B")
        pairs = [(of_a[document], of_b[document]) for document in of_a]
        a_better, b_better = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
        a_mean, b_mean = (math.fsum(column.values()) / len(column) for column in (of_a, of_b))
        p_value = sign_test(a_better, b_better)
        metrics.append(TaskMetric(task, metric, len(pairs), a_mean, b_mean, a_better, b_better, p_value))
    return metrics


def sign_test(a_better: int, b_better: int) -> float:
    """Returns the p-value of a sign test: the probability of counts at least as uneven by chance."""
    total, smaller = a_better + b_better, min(a_better, b_better)
    tail: int = sum(math.comb(total, count) for count in range(smaller + 1))
    return min(1.0, float(Fraction(2 * tail, 2**total)))
