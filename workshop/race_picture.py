"""Draws a recorded race as SVG: ``python -m workshop.race_picture docs/race.json docs/race.svg``."""

import argparse
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

Line = list[tuple[str, str]]  # letters, each with its origin

SIDES = {"plain": "Plain decoding", "speculation": "Speculation"}
XML = "{http://www.w3.org/XML/1998/namespace}"
LETTERS, LINES = 58, 18  # letters per line and lines that are shown
LETTER, LINE, MARGIN, TOP = 7.2, 19, 24, 64  # pixels
COLUMN = LETTERS * LETTER + MARGIN
WIDTH = MARGIN + 2 * COLUMN
STYLE = """
svg { --page: #ffffff; --ink: #1c1e21; --soft: #5d646c; --accepted: #d5efdc; --accepted-ink: #0d5c2b;
  --target: #fde4c0; --target-ink: #7a4400; --forced: #e6dcf8; --forced-ink: #5a2ca0; }
@media (prefers-color-scheme: dark) {
  svg { --page: #131519; --ink: #e7e9ec; --soft: #a2a9b2; --accepted: #12452a; --accepted-ink: #a9ebc0;
    --target: #54370c; --target-ink: #ffd697; --forced: #3d2a63; --forced-ink: #d9c5ff; }
}
.page { fill: var(--page); }
text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.text { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
.title { font-weight: 600; font-size: 16px; }
.verdict { font-weight: 600; font-size: 20px; }
.soft { fill: var(--soft); font-size: 12px; }
rect.accepted { fill: var(--accepted); } text.accepted { fill: var(--accepted-ink); }
rect.target { fill: var(--target); } text.target { fill: var(--target-ink); text-decoration: underline; }
rect.forced { fill: var(--forced); } text.forced { fill: var(--forced-ink); font-style: italic; }
rect.plain { fill: none; }
"""


def wrapped(pieces: Iterable[tuple[str, str]]) -> list[Line]:
    """Returns the lines of a text, broken after LETTERS letters."""
    lines: list[Line] = [[]]
    for text, origin in pieces:
        for letter in text.expandtabs(4):
            if letter == "\n" or len(lines[-1]) == LETTERS:
                lines.append([])
            if letter != "\n":
                lines[-1].append((letter if letter.isprintable() else "·", origin))
    return lines


def picture(record: dict[str, Any]) -> str:
    """Returns the first run of a record's first kind as SVG, and the ratios of all kinds."""
    kind = next(iter(record["kinds"].values()))
    columns = [wrapped(kind["first_texts"][side]) for side in SIDES]
    shown = min(max(map(len, columns)), LINES)
    bottom = TOP + shown * LINE + 20
    height = bottom + 82
    svg = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH:g} {height}", "role": "img"},
    )
    ElementTree.SubElement(svg, "title").text = "Plain decoding beside speculation: one prompt, one seed"
    ElementTree.SubElement(svg, "style").text = STYLE
    rectangle = {"width": f"{WIDTH:g}", "height": f"{height}", "rx": "8", "class": "page"}
    ElementTree.SubElement(svg, "rect", rectangle)
    for number, (side, lines) in enumerate(zip(SIDES, columns, strict=True)):
        x = MARGIN + number * COLUMN
        _write(svg, x, 28, SIDES[side], "title")
        _write(svg, x, 48, _times(kind["runs"][0][side]), "soft")
        for row, line in enumerate(lines[:LINES]):
            _draw_line(svg, x, TOP + row * LINE, line)
        if len(lines) > LINES:
            _write(svg, x, bottom - 8, f"and {len(lines) - LINES} lines more", "soft")
    _write(svg, MARGIN, bottom + 18, _verdict(kind), "verdict")
    _write(svg, MARGIN, bottom + 42, _ratios(record["kinds"]), "soft")
    machine = record["machine"]
    told = f"{machine['processor']}, {machine['cores']} cores, {record['date']}: {record['command']}"
    _write(svg, MARGIN, bottom + 62, told, "soft")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _draw_line(svg: ElementTree.Element, x: float, y: float, line: Line) -> None:
    column = 0
    for origin, letters in groupby(line, key=lambda letter: letter[1]):
        text = "".join(letter for letter, _ in letters)
        place, width = f"{x + column * LETTER:.1f}", f"{len(text) * LETTER:.1f}"
        column += len(text)
        box = {"x": place, "y": f"{y}", "width": width, "height": f"{LINE - 2}", "class": origin}
        ElementTree.SubElement(svg, "rect", box)
        # A fixed text length keeps each letter in its box with any font.
        fitted = {
            f"{XML}space": "preserve",
            "textLength": width,
            "lengthAdjust": "spacingAndGlyphs",
            "class": f"text {origin}",
        }
        ElementTree.SubElement(svg, "text", {"x": place, "y": f"{y + 13}", **fitted}).text = text


def _write(svg: ElementTree.Element, x: float, y: float, text: str, style: str) -> None:
    ElementTree.SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y}", "class": style}).text = text


def _times(answer: dict[str, Any]) -> str:
    speed, end = answer["tokens_per_second"], answer["last_token_s"]
    figures = [
        f"{answer['tokens']} tokens",
        "" if end is None else f"in {end:.2f} s",
        "" if speed is None else f"at {speed:.0f} tokens/s",
        f"in {answer['target_passes']} passes of the target",
    ]
    return ", ".join(filter(None, figures))


def _verdict(kind: dict[str, Any]) -> str:
    run = kind["runs"][0]
    speed = "" if run["ratio"] is None else f"{run['ratio']:.1f} times as fast, "
    return speed + (
        "same text" if run["parts_at"] is None else f"the texts differ from token {run['parts_at'] + 1} on"
    )


def _ratios(kinds: dict[str, Any]) -> str:
    known = {name: kind["ratio"] for name, kind in kinds.items() if kind["ratio"] is not None}
    runs = len(next(iter(kinds.values()))["runs"])
    equal = "all texts equal" if all(kind["same_text"] for kind in kinds.values()) else "SOME TEXTS DIFFER"
    medians = ", ".join(f"{name} {ratio:.2f} times" for name, ratio in known.items())
    return f"Medians of {runs} run{'s' if runs > 1 else ''}: {medians or 'none'}; {equal}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws a race that `outrider race --json` recorded.")
    parser.add_argument("race", type=Path, help="the record")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    files = parser.parse_args()
    files.picture.write_text(picture(json.loads(files.race.read_text(encoding="utf-8"))), encoding="utf-8")
