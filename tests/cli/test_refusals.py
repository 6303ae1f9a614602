"""Wrong settings, files and folders are refused before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "ray", "numpy"}
PROGRAM = f"""
import sys
from outrider.cli.command_line import main
code = main(sys.argv[1:])
print(code, *sorted({HEAVY} & {{*sys.modules}}))
"""


def refused(*words: str) -> str:
    """Returns what a command in a process of its own says of its refusal."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    assert run.stdout == "1\n"
    return run.stderr


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n')
    return str(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan target.modell=x", "target.modell='x' is no setting: target.model is one"),
        ("plan --memory many", "'many' is no amount"),
        ("plan --accelerator Z80", "accelerator 'Z80' is not known"),
        ("plan target=./nowhere", "target.model='./nowhere': there is no such folder"),
        ("plan target=demo-small draft=a/b/c", "drafts.model.model='a/b/c': there is no such folder"),
        ("plan target=~/model", "there is no such folder; ~ is not read here"),
        ("advise --prompts nowhere.jsonl", "nowhere.jsonl"),
        ("distil --prompts nowhere.jsonl --out o", "nowhere.jsonl"),
        ("distil --recorded nowhere --out o", "nowhere"),
    ],
)
def test_refusal_imports_nothing_heavy(words: str, told: str) -> None:
    error = refused(*words.split())
    assert error.startswith("outrider: ")
    assert told in error


@pytest.mark.parametrize("command", ["advise", "distil --out o"])
def test_refusal_of_a_wrong_setting_beside_a_right_file_imports_nothing_heavy(
    prompts: str, command: str
) -> None:
    told = refused(*command.split(), "--prompts", prompts, "target.modell=x")
    assert told == "outrider: target.modell='x' is no setting: target.model is one\n"


def test_refusal_of_a_file_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("# a deployment\ntarget:\n  modell: x\n")
    told = refused("plan", str(file))
    assert told == f"outrider: {file}:3: target.modell='x' is no setting: target.model is one\n"
