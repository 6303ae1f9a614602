"""Tasks of lm-eval: its program is called as it wants to be, and documents are compared one by one."""

import json
import stat
import sys
from pathlib import Path

import httpx
import pytest
from scipy.stats import binomtest

from workshop.checking import lm_eval
from workshop.checking.deployment import Deployment
from workshop.checking.errors import CheckError
from workshop.checking.lm_eval import compared, scores, sign_test
from workshop.checking.settings import CheckSettings, Mode

# Takes the options that lm-eval 0.4.13 takes, and writes what it writes: one line for each document.
PROGRAM = f"""#!{sys.executable}
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["run"])
parser.add_argument("--model", choices=["local-completions"], required=True)
for name in ("model_args", "tasks", "output_path"):
    parser.add_argument("--" + name, required=True)
parser.add_argument("--include_path"); parser.add_argument("--limit", type=float)
parser.add_argument("--seed"); parser.add_argument("--log_samples", action="store_true", required=True)
options = parser.parse_args()
arguments = dict(one.split("=", 1) for one in options.model_args.split(","))
assert arguments["base_url"] == "http://a/v1/completions" and arguments["tokenizer"] == "t", arguments
folder = pathlib.Path(options.output_path) / arguments["model"]
folder.mkdir(parents=True)
lines = [dict(doc_id=n, metrics=["acc"], acc=float(n % 2), doc={{}}) for n in range(int(options.limit or 4))]
(folder / f"samples_{{options.tasks}}_2026-01-01T00-00-00.000000.jsonl").write_text(
    "".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "lm_eval"
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(lm_eval, "program", lambda: str(program))


def deployment(mode: Mode = "auto") -> Deployment:
    made = Deployment("A", httpx.AsyncClient(base_url="http://a"), mode)
    made.model = "m"
    return made


async def test_scores_of_each_document_are_read(installed: None, tmp_path: Path) -> None:
    settings = CheckSettings(tokenizer="t", task_limit=3)
    found = await scores(deployment(), "capitals", settings, tmp_path / "results")
    assert found == {"acc": {"capitals/0": 0.0, "capitals/1": 1.0, "capitals/2": 0.0}}


async def test_program_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "program", lambda: "false")
    with pytest.raises(CheckError, match="lm_eval failed with x at A"):
        await scores(deployment(), "x", CheckSettings(tokenizer="t"), tmp_path)


@pytest.mark.parametrize(
    ("mode", "settings", "message"),
    [("off", CheckSettings(tokenizer="t"), "as deployed"), ("auto", CheckSettings(), "tokenizer: lm-eval")],
)
async def test_lm_eval_without_a_tokenizer_is_refused(
    installed: None, tmp_path: Path, mode: Mode, settings: CheckSettings, message: str
) -> None:
    with pytest.raises(CheckError, match=message):
        await scores(deployment(mode), "x", settings, tmp_path)


def test_lm_eval_missing_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/no/python")
    with pytest.raises(CheckError, match=r"pip install 'lm-eval\[api\]'"):
        lm_eval.program()


def test_documents_are_compared_one_by_one() -> None:
    a = {"acc": {"1": 1.0, "2": 1.0, "3": 0.0}}
    b = {"acc": {"1": 1.0, "2": 0.0, "3": 0.0}}
    (metric,) = compared("t", a, b)
    assert json.dumps(metric.__dict__) == json.dumps(
        {
            "task": "t",
            "metric": "acc",
            "documents": 3,
            "a": 2 / 3,
            "b": 1 / 3,
            "a_better": 1,
            "b_better": 0,
            "p_value": 1.0,
        }
    )


def test_lm_eval_scores_of_other_documents_are_refused() -> None:
    with pytest.raises(CheckError, match="other documents"):
        compared("t", {"acc": {"1": 1.0}}, {"acc": {"2": 1.0}})


@pytest.mark.parametrize(("a", "b"), [(0, 0), (5, 0), (3, 9), (20, 4), (7, 7)])
def test_sign_test_is_the_exact_binomial_one(a: int, b: int) -> None:
    assert sign_test(a, b) == pytest.approx(binomtest(a, a + b).pvalue if a + b else 1.0)
