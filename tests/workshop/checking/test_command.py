"""``outrider check``: exit codes, report, and errors that say what to do."""

import asyncio
import json
from pathlib import Path

import pytest

from outrider.cli.check_command import DIFFERENT, SAME, UNKNOWN
from outrider.cli.command_line import main
from tests.support.planted import DEFECTS, Services
from tests.support.running import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW = ["--requests", "4", "--answer-tokens", "24", "--samples", "0"]


@pytest.mark.slow
async def test_drafts_on_against_off_are_the_same(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, b = addresses
    options = [
        *FEW,
        "--a-speculation",
        "fixed",
        "--b-speculation",
        "off",
        "--report",
        str(tmp_path / "found"),
    ]
    assert await asyncio.to_thread(main, ["check", b, b, *options]) == SAME
    said = capsys.readouterr()
    assert said.out.startswith("# No difference found\n")
    assert "seeded requests: 4 of 4" in said.err
    assert (tmp_path / "found.md").read_text() == said.out
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["verdict"] == "same"
    assert [side["speculation"] for side in report["sides"]] == ["fixed", "off"]
    assert report["settings"]["requests"] == 4
    assert sum(kind["identical"] for kind in report["seeded"]["kinds"]) == 4


async def test_check_as_json_prints_the_report_alone(
    addresses: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, b = addresses
    assert await asyncio.to_thread(main, ["check", b, b, *FEW, "--json", "-"]) == SAME
    assert json.loads(capsys.readouterr().out)["verdict"] == "same"


async def test_difference_is_an_exit_code_and_a_reason(
    both: Services, addresses: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (target,) = both.b.of("target")
    with DEFECTS["top_p"].plant(target):
        command = ["check", *addresses, *FEW, "--kinds", "truncated"]
        assert await asyncio.to_thread(main, command) == DIFFERENT
    said = capsys.readouterr().out
    assert said.startswith("# They differ\n\n- ")
    assert "Where answers part first" in said


async def test_check_without_an_answer_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert await asyncio.to_thread(main, ["check", nobody, nobody]) == UNKNOWN
    assert f"({nobody}) does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "-1"], "--requests -1: Input should be greater than or equal to 0"),
        (["--kinds", "odd"], "--kinds odd: Input should be 'greedy', 'sampled', 'truncated' or 'json'"),
        (["--temperature", "0"], "--temperature 0: Input should be greater than 0"),
    ],
)
async def test_wrong_option_is_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "http://a", "http://b", *options]) == UNKNOWN
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [("", "holds no prompt"), ('"fine"\n{"text": 1}\n', "line 2"), ("not JSON\n", "line 1")],
)
async def test_file_of_prompts_that_is_wrong_is_named(
    addresses: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: str,
    message: str,
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    command = ["check", *addresses, *FEW, "--prompts", str(file)]
    assert await asyncio.to_thread(main, command) == UNKNOWN
    assert message in capsys.readouterr().err


async def test_own_prompts_and_an_own_text_are_used(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, text = tmp_path / "prompts.jsonl", tmp_path / "text.txt"
    prompts.write_text('"The sea"\n\n{"prompt": "The sky", "task": "prose"}\n')
    text.write_text("It rained for three days, and on the fourth the river came. " * 40)
    options = ["--requests", "2", "--answer-tokens", "4", "--samples", "0", "--report", str(tmp_path / "r")]
    command = ["check", *addresses, *options, "--prompts", str(prompts), "--text", str(text)]
    assert await asyncio.to_thread(main, command) == SAME
    perplexity = json.loads((tmp_path / "r.json").read_text())["perplexity"]
    assert (perplexity["texts"], perplexity["a"] > 1.0, perplexity["largest_difference"] < 1e-3) == (
        2,
        True,
        True,
    )
