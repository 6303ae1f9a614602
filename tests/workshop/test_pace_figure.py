"""The example of docs/pace.md says what the pace's own functions compute."""

from pathlib import Path

import pytest

from workshop.pace_figure import FIGURE, RATE, by_depth, by_load, chosen, draw

PAGE = (Path(__file__).parents[2] / "docs" / "pace.md").read_text()


@pytest.mark.parametrize("rows", [by_depth, by_load])
def test_page_has_the_computed_rows(rows):
    assert "\n".join(rows()) in PAGE


def test_page_names_the_chosen_depth():
    assert f"The pace chooses depth {chosen(RATE, 1):.0f}." in PAGE


def test_pace_figure_is_drawn(tmp_path):
    draw(tmp_path / "pace.png")
    assert (tmp_path / "pace.png").stat().st_size > 10_000
    assert FIGURE.is_file()
