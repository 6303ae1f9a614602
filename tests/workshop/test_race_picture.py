"""Picture of a recorded race: two texts coloured by origin, times, ratios, and the machine."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from workshop.race_picture import LETTERS, LINES, picture, wrapped

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def side(seconds: float) -> dict[str, Any]:
    return {"tokens": 3, "last_token_s": seconds, "tokens_per_second": 3 / seconds, "target_passes": 2}


def kind(ratio: float | None = 2.0, parts_at: int | None = None, text: str = "b <") -> dict[str, Any]:
    first = {"ratio": ratio, "parts_at": parts_at, "plain": side(1.0), "speculation": side(0.5)}
    texts = {
        "plain": [["a\n", "plain"], [text, "plain"]],
        "speculation": [["a\n", "target"], [text, "accepted"]],
    }
    return {"ratio": ratio, "same_text": parts_at is None, "runs": [first], "first_texts": texts}


def drawn(**kinds: dict[str, Any]) -> list[tuple[str | None, str]]:
    """Returns each text of the picture with its class."""
    machine = {"processor": "CPU X", "cores": 4}
    record = {"kinds": kinds, "machine": machine, "date": "2026-01-02", "command": "outrider race"}
    root = ElementTree.fromstring(picture(record))
    return [(element.text, element.attrib["class"]) for element in root.iter(f"{SVG}text")]


def words(**kinds: dict[str, Any]) -> str:
    return "\n".join(text or "" for text, _ in drawn(**kinds))


def test_picture_shows_both_texts_by_origin() -> None:
    texts = drawn(code=kind())
    for expected in (("b <", "text plain"), ("a", "text target"), ("b <", "text accepted")):
        assert expected in texts


def test_picture_shows_times_ratios_and_machine() -> None:
    shown = words(code=kind(2.04), prose=kind(0.9))
    assert "3 tokens, in 1.00 s, at 3 tokens/s" in shown
    assert "2.0 times as fast, same text" in shown
    assert "Medians of 1 run: code 2.04 times, prose 0.90 times; all texts equal" in shown
    assert "CPU X, 4 cores, 2026-01-02: outrider race" in shown


def test_picture_of_differing_texts_says_so() -> None:
    shown = words(code=kind(), prose=kind(parts_at=1))
    assert "SOME TEXTS DIFFER" in shown
    assert "the texts differ from token 2 on" in words(code=kind(parts_at=1))


def test_picture_without_speeds_claims_none() -> None:
    shown = words(code=kind(None))
    assert "times as fast" not in shown
    assert "Medians of 1 run: none" in shown


def test_picture_of_a_long_text_says_how_much_it_leaves_out() -> None:
    assert "and 4 lines more" in words(code=kind(text="x\n" * (LINES + 2)))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("ab", "plain"), ("\nc", "target")], ["ab", "c"]),
        ([("x" * (LETTERS + 1), "plain")], ["x" * LETTERS, "x"]),
        ([("\ta\x07", "plain")], ["    a·"]),
    ],
)
def test_wrapped_breaks_at_line_ends_and_at_the_width(pieces: Any, expected: list[str]) -> None:
    assert ["".join(letter for letter, _ in line) for line in wrapped(pieces)] == expected


def test_picture_of_the_docs_is_drawn_from_their_record() -> None:
    assert (DOCS / "race.svg").read_text() == picture(json.loads((DOCS / "race.json").read_text()))
