"""The written-out demo target appears whole or not at all, once for all who ask at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.demo import inflation, written_out
from outrider.demo.prompts import DEMO
from tests.support.demo_pair import DRAFTERS
from tests.support.target_drafters import drafted_texts, engine_with

# The width is that of the real one: it decides what bfloat16 rounds.
SMALL = {"hidden": 1024, "layers": 7, "intermediate": 528, "heads": 8, "kv_heads": 4}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache folder; what is written there has a size that tests can wait for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(written_out, "SIZES", SMALL)
    written_out.target.cache_clear()
    yield tmp_path / "outrider"
    written_out.target.cache_clear()


def logits(model: Path) -> torch.Tensor:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return loaded(torch.arange(40).view(2, 20) * 37 % 2048).logits


def test_write_out_writes_a_target_of_the_same_function(cache_folder: Path) -> None:
    written_out.write_out(str(written_out.target()))
    assert written_out.target().is_relative_to(cache_folder)
    torch.testing.assert_close(logits(written_out.target()), logits(DEMO / "target"), atol=1e-4, rtol=0)


def test_write_out_of_what_is_there_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written_out.target().mkdir(parents=True)
    monkeypatch.setattr(inflation, "inflate", lambda *_, **__: pytest.fail("it was written again"))
    written_out.write_out(str(written_out.target()))


def test_write_out_of_another_model_leaves_it_alone(cache_folder: Path) -> None:
    written_out.write_out("meta-llama/Llama-3.1-8B-Instruct")
    assert not cache_folder.exists()


def test_write_out_that_is_cut_off_leaves_no_target_and_is_made_good(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(source: Path, destination: Path, *_: object, **__: object) -> None:
        destination.mkdir(parents=True)
        (destination / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(inflation, "inflate", cut_off)
        with pytest.raises(KeyboardInterrupt):
            written_out.write_out(str(written_out.target()))
    assert not written_out.target().exists()
    written_out.write_out(str(written_out.target()))
    assert (written_out.target() / "model.safetensors").exists()
    assert not [*cache_folder.glob(".*.partial")]


@pytest.mark.slow
def test_write_out_by_two_processes_at_once_is_done_by_one() -> None:
    program = (
        "from outrider.demo import written_out;"
        f"written_out.SIZES = {SMALL};"
        "written_out.write_out(str(written_out.target()))"
    )
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert "".join(told).count("the demo target is written") == 1
    assert (written_out.target() / "config.json").exists()


def test_write_out_on_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_out, "BYTES", 2**60)
    with pytest.raises(
        OSError, match=r"MB are free\): it needs .* Let XDG_CACHE_HOME name .* target=demo-small"
    ):
        written_out.write_out(str(written_out.target()))


def test_write_out_in_a_folder_that_cannot_be_written_says_what_to_do() -> None:
    with pytest.raises(OSError, match=r"cannot be written to /dev/null/outrider/.*Let XDG_CACHE_HOME name"):
        written_out.write_out(f"/dev/null/outrider/{'/'.join(written_out.target().parts[-2:])}")


@pytest.mark.slow_beyond_first
@pytest.mark.parametrize("head", ["early_exit", "eagle3", "dflash", "medusa"])
def test_written_out_head_is_right_as_often_as_the_small_targets_head(head: str, cache_folder: Path) -> None:
    written_out.write_out(str(written_out.target()))
    layers = {"layers": 3} if head == "early_exit" else {}  # which three lie at the beginning of both
    small = engine_with(head, DRAFTERS / head, layers)
    model, checkpoint = written_out.target(), written_out.target().with_name(head)
    larger = engine_with(head, checkpoint, layers, model=str(model))
    before, after = (drafted_texts(target, 0.7, depth=4, company=6) for target in (small, larger))
    assert [text.tokens for text in after] == [text.tokens for text in before]
    accepted = [sum(text.accepted for text in texts) for texts in (before, after)]
    assert accepted[1] == pytest.approx(accepted[0], rel=0.02)


@pytest.mark.parametrize("changed", ["SOURCE", "HEADS", "RECIPE"])
def test_target_of_another_source_or_recipe_has_another_folder(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written_out.target()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("another release")
    monkeypatch.setattr(
        written_out, changed, [tmp_path / "new" / "file"] if changed == "RECIPE" else tmp_path / "new"
    )
    written_out.target.cache_clear()
    assert written_out.target() != before
