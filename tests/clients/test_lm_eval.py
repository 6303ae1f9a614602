"""lm-eval: choices by log-probabilities, and answers that are as right with drafts as without."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.demo.prompts import DEMO
from tests.clients.program import run
from tests.clients.served import Served
from tests.support.environments import TORCH
from workshop.demo.facts import COUNTRIES

pytestmark = pytest.mark.slow
LM_EVAL = ("lm-eval", TORCH, "lm-eval[api]==0.4.13", "transformers==5.23.0")
CAPITALS = [capital for _, capital, _, _ in COUNTRIES]
WAYS = {"drafted": {"mode": "fixed", "depth": 4}, "plain": {"mode": "off"}}
MODELS = {
    "local-completions": ("completions", "<|user|>{{question}}<|end|><|assistant|>", ()),
    "local-chat-completions": ("chat/completions", "{{question}}", ("--apply_chat_template",)),
}


async def test_lm_eval_choices_are_scored(served: Served, tmp_path: Path) -> None:
    """Choices are scored by ``echo`` with ``logprobs``, several prompts a request."""
    write_task(
        tmp_path,
        "choices",
        output_type="multiple_choice",
        doc_to_text="<|user|>{{question}}<|end|><|assistant|>{{begins}}",
        doc_to_choice="choices",
        doc_to_target="right",
        metric_list=[{"metric": "acc"}],
    )
    said = await evaluated(tmp_path, "local-completions", f"{served.v1}/completions", ["choices"], "4")
    assert said["choices"]["acc,none"] > 0.5, "four choices: a guess is right in one of four"


@pytest.mark.parametrize("model", MODELS)
async def test_answers_are_as_right_with_drafts_as_without(
    served: Served, tmp_path: Path, model: str
) -> None:
    path, prompt, options = MODELS[model]
    for way, speculation in WAYS.items():
        write_task(
            tmp_path,
            way,
            output_type="generate_until",
            doc_to_text=prompt,
            doc_to_target="answer",
            generation_kwargs={
                "until": ["."],
                "max_gen_toks": 24,
                "do_sample": True,
                "temperature": 1.3,
                "speculation": speculation,
                "task": way,
            },
            metric_list=[{"metric": "exact_match"}],
        )
    said = await evaluated(tmp_path, model, f"{served.v1}/{path}", [*WAYS], "1", *options)
    assert said["drafted"]["exact_match,none"] == said["plain"]["exact_match,none"] > 0.5
    assert answers(tmp_path, "drafted") == answers(tmp_path, "plain")
    assert await served.accepted("drafted") > len(COUNTRIES)
    assert await served.accepted("plain") == 0


async def evaluated(
    folder: Path, model: str, url: str, tasks: list[str], batch_size: str, *more: str
) -> Mapping[str, Any]:
    """The metrics of each task."""
    settings = {
        "model": "m",
        "base_url": url,
        "tokenizer": DEMO / "target",
        "tokenizer_backend": "huggingface",
    }
    options = {
        "--model": model,
        "--model_args": ",".join(f"{name}={value}" for name, value in settings.items()),
        "--tasks": ",".join(tasks),
        "--include_path": folder,
        "--batch_size": batch_size,
        "--output_path": folder / "results",
    }
    await run(LM_EVAL, "lm_eval", "run", "--log_samples", *more, options=options)
    (results,) = (folder / "results").rglob("results*.json")
    metrics: Mapping[str, Any] = json.loads(results.read_text())["results"]
    return metrics


def answers(folder: Path, task: str) -> dict[int, str]:
    """What was said to each document."""
    (samples,) = (folder / "results").rglob(f"samples_{task}_*.jsonl")
    read = map(json.loads, samples.read_text().splitlines())
    return {sample["doc_id"]: sample["resps"] for sample in read}


def write_task(folder: Path, name: str, **task: Any) -> None:
    """About the capitals of countries, each with four to choose from."""
    chooser, lines = random.Random(1), list[str]()
    for country, capital, _, _ in COUNTRIES:
        choices = [capital, *chooser.sample([other for other in CAPITALS if other != capital], 3)]
        chooser.shuffle(choices)
        document = {
            "question": f"What is the capital of {country}?",
            "begins": f"The capital of {country} is",
            "answer": f"The capital of {country} is {capital}",
            "choices": choices,
            "right": choices.index(capital),
        }
        lines.append(json.dumps(document))
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(lines))
    told = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **task,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(told))
