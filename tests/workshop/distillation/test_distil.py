"""`outrider distil` on the demo pair, from prompts or recorded traffic to a loadable checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.arguments import read_settings
from gateway.recorded_answers import RecordedAnswer, read_folder
from outrider.cli.command_line import main
from outrider.demo.prompts import DEMO, prompts
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from tests.support.demo_pair import prompt_of
from tests.support.killed_training import killed_at
from workshop.demo.consignments import KIND, consignments
from workshop.distillation.answers import answer_all
from workshop.distillation.distil import UNFINISHED
from workshop.distillation.settings import DistilSettings
from workshop.training.loop import PROGRESS

QUICK = ["target=demo-small", "target.self_check=false", "target.cache_memory=100000000"]
SMALL = ["--tokens", "16", "--steps", "24", "--rows", "4", "--length", "96", "--learning-rate", "4e-3"]
SMALL += ["--measure-every", "8", "--threads", "1"]


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": text, "task": KIND} for text in consignments(16)]
    lines += [{"prompt": text} for text in prompts("json", 9)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def distil(out: Path, *options: str) -> int:
    return main(["distil", *QUICK, "--out", str(out), *SMALL, *options])


@pytest.fixture(scope="module")
def fitted(prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("distil") / "fitted"
    assert distil(out, "--prompts", str(prompts_file)) == 0
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def progress(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / PROGRESS).read_text().splitlines()]


@pytest.mark.slow
def test_acceptance_on_held_out_prompts_rises(fitted: Path) -> None:
    told = progress(fitted)
    assert [line["step"] for line in told] == [0, 8, 16, 24]
    before, *later = (line["acceptance"][0] for line in told)
    assert max(later) > before + 0.02


def test_distil_writes_a_checkpoint_for_a_draft(fitted: Path) -> None:
    settings = read_settings(
        {"target": "demo-small", "draft": str(fitted), "drafts.model.cache_memory": "100000000"}
    )
    assert settings.drafts["model"].model == str(fitted)
    engine = Engine.from_settings(settings.draft_engine("model"))
    assert engine.vocab_size == 2048
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert all((fitted / name).read_bytes() == (DEMO / "draft" / name).read_bytes() for name in names)
    given = weights(DEMO / "draft")
    assert weights(fitted).keys() == given.keys()
    assert any(not torch.equal(tensor, given[name]) for name, tensor in weights(fitted).items())


def test_card_tells_data_steps_and_acceptance_before_and_after(fitted: Path) -> None:
    card = (fitted / "README.md").read_text()
    assert "# A draft model, fitted" in card
    assert "for the target `outrider-demo-small`" in card
    assert "21 texts of" in card  # 25 prompts, of which 2 and 2 are held out
    assert "24 steps were taken" in card
    assert "- learning_rate: 0.004" in card
    rows = {row.split(" | ")[0]: row.strip("| ").split(" | ") for row in card.splitlines() if row[:2] == "| "}
    task, texts, before, after = rows[f"| {KIND}"]
    assert (task, texts) == (KIND, "2")
    assert float(after) > float(before)


def test_distil_leaves_no_traffic_in_the_folder(fitted: Path) -> None:
    assert not (fitted / UNFINISHED).exists()
    assert not list(fitted.rglob("*answers*")) + list(fitted.rglob("*questions*"))


@pytest.mark.slow
def test_distil_after_a_kill_ends_as_without_it(
    fitted: Path, prompts_file: Path, tmp_path: Path, capsys
) -> None:
    with killed_at(18):
        distil(tmp_path / "fitted", "--prompts", str(prompts_file))
    assert not (tmp_path / "fitted" / "model.safetensors").exists()
    assert distil(tmp_path / "fitted", "--prompts", str(prompts_file), "--seed", "2") == 1
    assert "unfinished distillation with another seed" in capsys.readouterr().err
    assert distil(tmp_path / "fitted", "--prompts", str(prompts_file)) == 0
    assert "goes on after 16 steps" in capsys.readouterr().out
    assert progress(tmp_path / "fitted") == progress(fitted)
    again = weights(tmp_path / "fitted")
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights(fitted).items())


def test_folder_that_has_something_else_is_refused(fitted: Path, prompts_file: Path, capsys) -> None:
    assert distil(fitted, "--prompts", str(prompts_file)) == 1
    assert "is not empty: name a folder that is new" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("medusa", []),
        # tests/workshop/training fits these drafters too
        pytest.param("eagle3", ["--layers", "2", "4", "6"], marks=pytest.mark.slow),
        pytest.param("dflash", ["--layers", "2", "4", "6", "--mask-token", "1"], marks=pytest.mark.slow),
        pytest.param("parallel", ["--mask-token", "1"], marks=pytest.mark.slow),
    ],
)
def test_kept_traffic_is_trained_on_as_it_is_and_any_drafter_is_fitted(
    tmp_path: Path, drafter: str, options: list[str]
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    lines = [
        RecordedAnswer(prompt=prompt_of("json", index), answer=(17, 18, 19) * 9, temperature=0.7)
        for index in range(9)
    ]
    (folder / "1-a.jsonl").write_text("".join(line.line() for line in lines))
    out = tmp_path / "fitted"
    more = ["--drafter", drafter, "--steps", "4", "--measure-every", "2", "--depth", "2", *options]
    assert distil(out, "--recorded", str(folder), *more) == 0
    told = progress(out)
    assert [len(line["acceptance"]) for line in told] == [2, 2, 2]
    assert "recorded traffic" in (out / "README.md").read_text()
    assert (out / "config.json").exists()
    assert read_folder(folder, 99) == lines[::-1]  # nobody has touched it


def test_prompt_that_fills_the_context_keeps_no_answer(tmp_path: Path) -> None:
    long, short = (
        RecordedAnswer(prompt=(9,) * 2047, answer=(), temperature=1.0),
        RecordedAnswer(prompt=prompt_of("json"), answer=(), temperature=0.0, task="json"),
    )
    settings = EngineSettings(
        model=str(DEMO / "target"), dtype="float32", cache_memory=100_000_000, self_check=False
    )
    asked = DistilSettings(tokens=4)
    answers = answer_all([long, short], tmp_path / "answers.jsonl", settings, asked, print)
    assert [len(answer.answer) for answer in answers] == [0, 4]
    assert [answer.task for answer in answers] == [None, "json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "0"], "--steps 0: Input should be greater than or equal to 1"),
        (["--drafter", "ngram"], "--drafter ngram: Input should be"),
        (["--drafter", "medusa", "--draft", "d"], "draft='d' is for a draft model, and drafter=medusa"),
        (["--mask-token", "3"], "mask_token=3 is for drafter=parallel or dflash, and drafter=model"),
        (
            ["--drafter", "medusa", "--layers", "1"],
            "layers=(1,) is for drafter=eagle3 or dflash, and drafter=medusa",
        ),
        (["--drafter", "dflash", "--depth", "1"], "depth=1 must be at least 2 for drafter=dflash"),
        (["--drafter", "dflash"], "names none, so give the id of a token that no text has"),
        (["--drafter", "parallel"], "names none, so give the id of a token that no text has"),
        (["--prompts", "nowhere.jsonl"], "No such file or directory: 'nowhere.jsonl'"),
    ],
)
def test_distil_refuses_wrong_options_by_name(
    tmp_path: Path, prompts_file: Path, options: list[str], said: str, capsys
) -> None:
    assert distil(tmp_path / "out", "--prompts", str(prompts_file), *options) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


def test_draft_with_another_tokenizer_is_refused(tmp_path: Path, prompts_file: Path, capsys) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for file in (DEMO / "draft").iterdir():
        (stranger / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    asked = ["--prompts", str(prompts_file), "--draft", str(stranger)]
    assert distil(tmp_path / "out", *asked) == 1
    assert "have different vocabularies: 'a' is" in capsys.readouterr().err
