"""`outrider advise` on the demo pair: what it compares, what it refuses, what it writes."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from transformers import AutoTokenizer

from cluster.arguments import read_settings
from outrider.cli.command_line import main
from outrider.demo.prompts import DEMO, prompts
from outrider.drafters.registry import Place
from outrider.engine.planning.accelerators import ACCELERATORS
from outrider.engine.planning.step_costs import HOST
from outrider.engine.settings import TargetDrafterSettings
from tests.support.heads import write_medusa
from workshop.advice.advice import Advice, Judgement
from workshop.advice.advise import Accelerators, Adviser
from workshop.advice.answers import read_prompts
from workshop.advice.candidates import candidates
from workshop.advice.picture import draw
from workshop.advice.planned import planned
from workshop.advice.report import as_json, report
from workshop.advice.settings import AdviceSettings

KINDS = ("json", "stories")
SMALL = {"target": "demo-small"}
CHECKS = ("target.self_check", "drafts.model.self_check")
COPIES = {"the target int8", "the target int4"}
GB = 10**9


@cache
def folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def prompts_file(place: Path) -> Path:
    lines = [json.dumps({"prompt": prompts(kind, 1)[0], "task": kind}) for kind in KINDS]
    file = place / "prompts.jsonl"
    file.write_text("\n".join(lines))
    return file


@cache
def checkpoints() -> dict[str, str]:
    """A head, a parallel draft, and a model of another tokenizer, all of the demo pair's shapes."""
    place = Path(folder().name)
    for name in ("stranger", "parallel"):
        shutil.copytree(DEMO / "draft", place / name)
    tokenizer = json.loads((place / "stranger" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (place / "stranger" / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((place / "parallel" / "config.json").read_text())
    (place / "parallel" / "config.json").write_text(json.dumps({**config, "pard_token": 5}))
    write_medusa(place / "medusa")
    return {name: str(place / name) for name in ("stranger", "parallel", "medusa")}


@cache
def advised() -> Advice:
    """Advice without quantized forms, which load slowly."""
    settings = read_settings(SMALL | dict.fromkeys(CHECKS, "false")).with_gpus(0)
    asked = AdviceSettings(
        temperatures=(0.7,),
        tokens=16,
        depth=4,
        repetitions=3,  # the median of fewer follows a single step that waited for a processor
        streams=(1, 4),
        price_per_hour=4.0,
        draft_price_per_hour=1.0,
    )
    given = checkpoints()
    compared = candidates(settings, [given["stranger"], given["parallel"]], {"medusa": given["medusa"]})
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    asker = Adviser(settings, asked, memories(8 * GB, 8 * GB))
    prompts = read_prompts(prompts_file(Path(folder().name)), tokenizer)
    return asker.advise(prompts, [candidate for candidate in compared if candidate.quantization is None])


def memories(target: int, draft: int) -> dict[str, int]:
    return {"target": target, "drafts.model": draft}


def named(name: str) -> Judgement:
    (found,) = [judgement for judgement in advised().judgements if judgement.name == name]
    return found


@pytest.mark.slow
def test_advise_judges_every_kind_of_candidate() -> None:
    assert {judgement.name: judgement.drafter for judgement in advised().judgements} == {
        "draft": "model",
        "draft + suffix": "model+suffix",
        "parallel": "parallel",
        "parallel + suffix": "parallel+suffix",
        "ngram": "ngram",
        "suffix": "suffix",
        "medusa": "medusa",
    }


@pytest.mark.slow
def test_model_with_another_tokenizer_is_refused_by_name() -> None:
    refused = advised().refused
    assert [*refused] == ["stranger", "stranger + suffix"]
    assert all("stranger" in reason and "different vocabularies" in reason for reason in refused.values())


@pytest.mark.slow
def test_judgement_of_a_candidate_has_all_figures() -> None:
    draft = named("draft")
    assert [(found.task, found.temperature) for found in draft.findings] == [(kind, 0.7) for kind in KINDS]
    for found in draft.findings:
        assert [*found.by_depth] == [1, 2, 3, 4]
        assert 1.0 <= found.by_depth[1].tokens_per_pass <= 2.0
        assert [rates.streams for rates in found.expected] == [1, 4]
        assert all(rates.speedup >= 1.0 for rates in found.expected)
    assert draft.step_s is not None
    assert draft.times_faster == draft.costs.target.seconds(1, 1) / draft.step_s
    assert named("ngram").times_faster is None
    of_gateway = zip(named("ngram").dollars, advised().dollars, strict=True)
    assert all(mine <= plain * 1.001 for mine, plain in of_gateway if mine and plain)


@pytest.mark.slow
def test_target_drafter_takes_a_part_of_the_targets_cache() -> None:
    assert named("ngram").target_cache > named("medusa").target_cache > 0
    assert named("ngram").draft_memory == 0 < named("draft").draft_memory
    assert named("ngram").target_cache > named("draft").target_cache  # on one machine


@pytest.mark.slow
def test_advice_is_written_down(tmp_path: Path) -> None:
    advice = advised()
    written = json.loads(json.dumps(as_json(advice)))
    assert [candidate["name"] for candidate in written["candidates"]] == [
        candidate.name for candidate in advice.ranking
    ]
    best = written["candidates"][0]
    assert best["by_task"][0]["acceptance_by_position"] == advice.ranking[0].findings[0].deepest.rates
    assert [rates["depth"] for rates in best["by_task"][0]["expected"]] == [
        rates.depth for rates in advice.ranking[0].findings[0].expected
    ]
    text = report(advice)
    assert text.endswith(advice.recommendation)
    assert all(judgement.name in text for judgement in advice.judgements)
    assert "refused: stranger: " in text
    draw(advice, tmp_path / "advice.png")
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_command_compares_quantized_forms_and_the_targets_copy(tmp_path: Path) -> None:
    options = ["--temperatures", "0.7", "--tokens", "16", "--streams", "1", "--repetitions", "1"]
    files = ["--json", str(tmp_path / "advice.json"), "--picture", str(tmp_path / "advice.svg")]
    assert (
        main(["advise", "target=demo-small", "--prompts", str(prompts_file(tmp_path)), *options, *files]) == 0
    )
    written = json.loads((tmp_path / "advice.json").read_text())
    found = {candidate["name"]: candidate for candidate in written["candidates"]}
    models = {"draft", "draft int8", "draft int4", "draft + suffix"}
    assert {*found} - COPIES == {*models, "ngram", "suffix"}
    assert found["draft int8"]["acceptance_rate"] == pytest.approx(found["draft"]["acceptance_rate"], abs=0.1)
    # In 8 and 4 bit a step of so small a target is hardly shorter.
    assert {*found, *written["refused"]} >= COPIES
    for name in COPIES & found.keys():
        assert found[name]["acceptance_rate"] >= max(found["draft"]["acceptance_rate"], 0.9)
        assert any("times faster" in warning for warning in found[name]["warnings"])
    assert all("would not pay" in reason for reason in written["refused"].values())
    assert (tmp_path / "advice.svg").exists()


@pytest.mark.slow
def test_advise_with_data_sheets_measures_nothing() -> None:
    settings = read_settings(SMALL | dict.fromkeys(CHECKS, "false")).with_gpus(2)
    devices = Accelerators(ACCELERATORS["H100"], ACCELERATORS["L4"])
    asked = AdviceSettings(temperatures=(0.0,), tokens=8, streams=(1,))
    (draft, *_) = candidates(settings, [], {})
    told: list[str] = []
    asker = Adviser(settings, asked, memories(80 * GB, 24 * GB), devices, told.append)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    advice = asker.advise(read_prompts(prompts_file(Path(folder().name)), tokenizer), [draft])
    started = [line for line in told if not re.match(r"\d+ of ", line)]  # a slow machine tells how far it is
    assert started == ["the target answers 2 prompts at temperature 0", "draft is judged, 1 of 1"]
    assert not advice.is_measured
    # The device is through with a small model before the host is with the step.
    assert advice.step_ms == pytest.approx(1e3 * HOST.step_s, rel=0.1)
    assert advice.judgements[0].target_cache > 50 * GB


def of_a_slow_draft(step_s: float, accelerators: Accelerators, **asked: float) -> tuple[Advice, list[str]]:
    """Advice where each step of the draft takes so long, and what was told meanwhile."""
    settings = read_settings(
        SMALL | dict.fromkeys(CHECKS, "false") | {"drafts.model.shortest_step_s": str(step_s)}
    )
    few = AdviceSettings(temperatures=(0.0,), tokens=8, streams=(1,), repetitions=1, depth=2).model_copy(
        update=asked
    )
    compared = [candidate for candidate in candidates(settings, [], {}) if candidate.quantization is None]
    told: list[str] = []
    asker = Adviser(settings.with_gpus(0), few, memories(8 * GB, 8 * GB), accelerators, told.append)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    advice = asker.advise(read_prompts(prompts_file(Path(folder().name)), tokenizer), compared)
    return advice, told


@pytest.mark.slow
def test_draft_that_cannot_pay_here_is_not_judged_and_the_others_are() -> None:
    advice, told = of_a_slow_draft(1.5, Accelerators())
    assert {*advice.refused} == {"draft", "draft + suffix"}
    assert re.match(
        r"a step takes 1\d\d\d\.\d ms here, one of the target .* would not pay", advice.refused["draft"]
    )
    assert f"draft is refused: {advice.refused['draft']}" in told
    assert {judgement.name for judgement in advice.judgements} == {"ngram", "suffix"}


@pytest.mark.slow
def test_candidate_is_given_up_when_its_time_is_up() -> None:
    devices = Accelerators(ACCELERATORS["H100"], ACCELERATORS["H100"])
    advice, _ = of_a_slow_draft(0.1, devices, candidate_seconds=0.25)
    assert re.match(r"after 0\.25 s \d+ of \d+ tokens judged; --candidate-seconds", advice.refused["draft"])
    assert {judgement.name for judgement in advice.judgements} == {"ngram", "suffix"}


@pytest.mark.slow
def test_command_advises_from_its_arguments_to_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models of one layer are compared, quantized forms included."""
    draft = shutil.copytree(DEMO / "draft", tmp_path / "small")
    deployment = tmp_path / "outrider.yaml"
    deployment.write_text(f"target: {{model: {DEMO / 'draft'}}}\ndrafts: {{model: {{model: {draft}}}}}\n")
    options = ["--temperatures", "0", "--tokens", "8", "--depth", "2", "--streams", "1", "--repetitions", "1"]
    files = ["--prompts", str(prompts_file(tmp_path)), "--json", str(tmp_path / "advice.json")]
    assert main(["advise", str(deployment), *files, *options]) == 0
    printed, told = capsys.readouterr()
    names = ["small", "small int8", "small int4", "small + suffix", *sorted(COPIES, reverse=True)]
    for number, name in enumerate([*names, "ngram", "suffix"], start=1):
        assert f"outrider: {name} is judged, {number} of 8\n" in told
        assert re.search(rf"^(refused: )?{re.escape(name)}\b", printed, re.MULTILINE)
    written = json.loads((tmp_path / "advice.json").read_text())
    assert len(written["candidates"]) + len(written["refused"]) == 8
    assert printed.endswith(f"\n{written['recommendation']}\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["target.tensor_parallel=2"], "tensor_parallel=2: the target answers in one process"),
        (["--head", "medusa"], "--head medusa: name its drafter too"),
        (["--head", "early_exit=/no/exits"], "/no/exits"),
        (["--head", "ngram=x"], "'ngram' is no target drafter"),
        (["--accelerator", "Z80"], "accelerator 'Z80' is not known: give one of"),
        (["--tokens", "1"], "--tokens 1: Input should be greater than or equal to 2"),
        (["--temperatures", "-1"], "--temperatures -1: Input should be greater than or equal to 0"),
        (["--draft", "/no/such/model"], "'/no/such/model' is no model that can draft"),
    ],
    ids=str,
)
def test_advise_names_what_it_refuses(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--prompts", str(prompts_file(tmp_path)), "target=demo-small", *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("outrider: ")
    assert re.search(said, error), error


def test_settings_drafts_and_heads_are_candidates() -> None:
    settings = read_settings({"target": str(DEMO / "target"), "target.drafters.eagle3.checkpoint": "h"})
    found = {candidate.name: candidate for candidate in candidates(settings, [], {"medusa": "m"})}
    assert [*found] == ["the target int8", "the target int4", "ngram", "suffix", "eagle3", "medusa"]
    beside = found["medusa"].settings(settings)
    assert (beside.target.drafters, beside.drafts) == ({"medusa": TargetDrafterSettings(checkpoint="m")}, {})
    alone = found["ngram"].settings(settings)
    assert alone.target.drafters == {}
    own = found["the target int4"]
    assert own.info.place is Place.DRAFT_WORKER
    assert own.draft_engine(settings).quantization == "int4"


@pytest.mark.slow
def test_targets_own_layers_are_candidates_where_the_settings_name_them() -> None:
    settings = read_settings({"target": str(DEMO / "target"), "target.drafters.early_exit": "{}"})
    found = {
        candidate.name: candidate
        for candidate in candidates(settings, [], {})
        if candidate.info.name == "early_exit"
    }
    assert [*found] == [f"early_exit {layers}" for layers in (1, 2, 3, 4)]
    assert found["early_exit 2"].settings(settings).target.drafters["early_exit"].layers == 2
    plans = [
        planned(candidate, settings.with_gpus(1), memories(80 * GB, 80 * GB)) for candidate in found.values()
    ]
    reading = [plan.draft_steps.weight_bytes for plan in plans if plan.draft_steps is not None]
    assert reading == sorted(reading)
    assert reading[-1] < plans[0].target_steps.weight_bytes
