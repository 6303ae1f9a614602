"""Options of commands that are the fields of a settings class."""

import argparse

import pytest
from pydantic import BaseModel, ConfigDict, Field

from outrider.cli.options import add_options, read_options


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    top_k: int = Field(default=3, ge=1, description="100% of tokens")
    kinds: tuple[str, ...] = Field(default=("a", "b"), description="kinds")


def read(*words: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    return read_options(parser.parse_args(words), Settings)


def test_read_options_without_options_keeps_the_defaults() -> None:
    assert read() == Settings()


@pytest.mark.parametrize("words", [["x", "y"], ["x,y"]])
def test_read_options_of_a_list_splits_at_spaces_and_commas(words: list[str]) -> None:
    assert read("--kinds", *words).kinds == ("x", "y")


def test_read_options_of_a_refused_value_names_its_option() -> None:
    with pytest.raises(ValueError, match="--top-k 0: Input should be greater than or equal to 1"):
        read("--top-k", "0")


def test_add_options_shows_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    assert "--top-k K" in shown
    assert "100% of tokens [3]" in shown
    assert "kinds [a b]" in shown
