"""Clients as people have them, each in an environment of its own, against the demo pair."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import yaml

from outrider.demo.facts import COUNTRIES
from outrider.demo.prompts import DEMO
from tests.support.environments import environment

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


async def run(*command: object) -> str:
    """What the program prints, once it has ended well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed[-4000:]
    return printed


async def test_openai(base_url: str) -> None:
    programs = await asyncio.to_thread(environment, "openai", "openai==3.54.0")
    assert "3.54.0" in await run(programs / "python", HERE / "openai_client.py", base_url)


async def test_lm_eval_scores_and_generates(base_url: str, tmp_path: Path) -> None:
    programs = await asyncio.to_thread(
        environment, "lm-eval", "lm-eval[api]==0.4.13", "transformers==5.23.0", torch=True
    )
    task = write_task(tmp_path)
    model = {"model": "m", "base_url": f"{base_url}/completions", "tokenizer": DEMO / "target"}
    arguments = {
        "--model": "local-completions",
        "--model_args": ",".join(f"{name}={value}" for name, value in model.items()),
        "--tasks": task,
        "--include_path": tmp_path,
        "--batch_size": 4,
        "--output_path": tmp_path / "results",
    }
    await run(programs / "lm_eval", "run", *(part for pair in arguments.items() for part in pair))
    (results,) = (tmp_path / "results").rglob("results*.json")
    accuracy = json.loads(results.read_text())["results"][task]["acc,none"]
    assert accuracy > 0.5, "four choices: a guess is right in one of four"


def write_task(folder: Path) -> str:
    """Which of four is a country's capital, by log-probabilities."""
    chooser, capitals = random.Random(1), [capital for _, capital, _, _ in COUNTRIES]
    lines = []
    for name, capital, _, _ in COUNTRIES[:20]:
        choices = [capital, *chooser.sample([other for other in capitals if other != capital], 3)]
        chooser.shuffle(choices)
        question = f"What is the capital of {name}?"
        lines.append(
            {"country": name, "question": question, "choices": choices, "answer": choices.index(capital)}
        )
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    task = {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "<|user|>{{question}}<|end|><|assistant|>The capital of {{country}} is",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "capitals.yaml").write_text(yaml.safe_dump(task))
    return "capitals"
