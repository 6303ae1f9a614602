"""What the pages point to exists: links and their anchors, files, modules. The README stays short."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from cluster.settings import Settings
from outrider.drafters.registry import Place, drafters
from workshop.pages.settings_tables import sections

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "gateway", "cluster", "actors", "protos", "bench")
LINES_OF_README, LONGEST_PARAGRAPH = 200, 700
FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?")
SUFFIXES = {".py", ".md", ".proto", ".json", ".yaml", ".png", ".html", ".js", ".css", ".toml", ".safetensors"}
BENCHMARK = re.compile(r"python -m bench([ .])([a-z]\w*)")
NAME = re.compile(rf"(?<![\w./-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")


@cache
def files() -> tuple[str, ...]:
    """Returns the files of the repository, including files that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in said.splitlines() if (ROOT / name).exists())


PAGES = sorted(name for name in files() if name.endswith(".md"))


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes of headings."""
    found: dict[str, int] = {}
    for title in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {
        f"{name}-{number}" if number else name for name, last in found.items() for number in range(last + 1)
    }


def broken_links(text: str, page: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(text if target == page else target.read_text()):
            yield f"{link}: no such heading"


def missing_files(text: str, page: Path) -> Iterator[str]:
    """Returns the paths named in backticks, from the root or the page's folder; a * is any name."""
    tops = {name.partition("/")[0] for name in files() if "/" in name}
    for code in CODE.findall(FENCE.sub("", text)):
        for path in FILE.findall(code) if not code.startswith("/") and "://" not in code else []:
            if path.partition("/")[0] not in tops and Path(path).suffix not in SUFFIXES:
                continue
            if not any(next(folder.glob(path.rstrip("/")), None) for folder in (ROOT, page.parent)):
                yield path


SETTINGS = {
    f"{section.path}{field}" for section in sections(Settings) for field in section.model.model_fields
}


def missing_names(text: str) -> Iterator[str]:
    """Modules of ours, and what is named in them."""
    for name in NAME.findall(text):
        if name in SETTINGS:
            continue
        place, rest = ROOT, name.split(".")
        if rest[0] == "outrider" and not _is_module(ROOT / "outrider" / rest[1]) and rest[1] != "Client":
            continue  # a file, a span's attribute
        while rest and _is_module(place / rest[0]):
            place /= rest.pop(0)
        file = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if rest and not re.search(rf"\b{rest[0]}\b", file.read_text()):
            yield name


SETTING = re.compile(rf"(?<![\w./:@-])(?:{'|'.join(Settings.model_fields)})(?:\.[a-z_]+)+(?![\w/(.-])")
TARGET_DRAFTERS = "|".join(row.name for row in drafters() if row.place is Place.TARGET_WORKER)
REFUSED = re.compile(r"^.*outrider plan .*\n(?:outrider: .*(?:\n|\Z))*", re.M)  # shown as a wrong name


def missing_settings(text: str) -> Iterator[str]:
    """Paths that begin as those of settings do and are none.

    A draft may have any name, and a target drafter that of any row of the registry.
    """
    for path in SETTING.findall(REFUSED.sub("", text)):
        group, second, *_ = path.split(".")
        is_module = (ROOT / group / second).is_dir() or _is_module(ROOT / group / second)
        known = re.sub(r"^drafts\.[a-z_]+", "drafts.NAME", path)
        known = re.sub(rf"^target\.drafters\.({TARGET_DRAFTERS})\b", "target.drafters.NAME", known)
        known = re.sub(r"^target\.adapters\.\w+$", "target.adapters", known)
        is_other = (
            Path(path).suffix in SUFFIXES or is_module or known in ("drafts.NAME", "target.drafters.NAME")
        )
        if not is_other and known not in SETTINGS:
            yield path


def missing_benchmarks(text: str) -> Iterator[str]:
    """Yields the names that ``python -m bench`` is given and that are none."""
    for space, name in BENCHMARK.findall(text):
        files = [path for path in _files_of(ROOT / "bench" / name) if path.is_file()]
        if space != " " or not any(re.search(r"^def main\(", file.read_text(), re.M) for file in files):
            yield f"bench{space}{name}"


def _files_of(module: Path) -> tuple[Path, Path]:
    return module.with_suffix(".py"), module / "__init__.py"


def _is_module(path: Path) -> bool:
    return any(file.is_file() for file in _files_of(path))


def missing(text: str, page: Path) -> Iterator[str]:
    yield from broken_links(text, page)
    yield from missing_files(text, page)
    yield from missing_names(text)
    yield from missing_settings(text)
    yield from missing_benchmarks(text)


@pytest.mark.parametrize("name", PAGES)
def test_page_points_only_to_what_exists(name: str) -> None:
    page = ROOT / name
    text = page.read_text()
    assert not [*missing(text, page)], f"{name} points to what does not exist"


def test_code_names_only_benchmarks_that_exist() -> None:
    sources = [ROOT / name for name in files() if name.endswith(".py") and not name.startswith("tests/")]
    assert len(sources) > 300
    missing = {path.name: [*missing_benchmarks(path.read_text())] for path in sources}
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.mark.parametrize("name", [name for name in files() if name.endswith(".yaml")])
def test_manifest_names_only_files_of_ours_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not [*missing_names(text), *missing_benchmarks(text)]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link)
        found = {(page.parent / link).resolve() for link in links if link.endswith(".md")}
        ahead += found - reached
    assert not {ROOT / name for name in PAGES} - reached


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES_OF_README


@pytest.mark.parametrize("name", PAGES)
def test_no_paragraph_is_long(name: str) -> None:
    prose = re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d+\.) )", FENCE.sub("", (ROOT / name).read_text()))
    long = [
        part.strip()[:60]
        for part in prose
        if len(part) > LONGEST_PARAGRAPH and not part.lstrip().startswith("|")
    ]
    assert not long


@pytest.mark.parametrize(
    "text",
    [
        "[a](no-such-page.md)",
        "[a](README.md#no-such-heading)",
        "[a](#no-such-heading)\n## A heading",
        "`gateway/no_such_file.py`",
        "`bench/results/*.no-such-suffix`",
        "`python -m bench no_such_benchmark`",
        "`python -m bench streams`",
        "`python -m bench.tables`",
        "bench.no_such_module",
        "`target.block_size`",
        "drafts.model.replica=2",
        "gateway.proxy.add_generation_servicer",
        "`outrider.client.generation.Client`",
        "`outrider/engine/no_such_folder/`",
    ],
)
def test_missing_target_is_seen(text: str) -> None:
    assert [*missing(text, ROOT / "README.md")]


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://example.org/no-such-page.md)",
        "```\n[a](no-such-page.md)\n```",
        "[a](#a-heading-1)\n## A heading\n## A `heading`!",
        "`/v1/completions`, `http/protobuf`, `owner/name@revision`, `config.json`",
        "`bench/results/*.json`, `tests/fuzz/`, `python -m bench tables`, outrider.yaml, `outrider.Client`",
        "`gateway.api.proxy.add_generation_servicer`, serve run cluster.app, bench.tables.reading",
        "`target.tensor_parallel=4`, `drafts.next.cache_memory`, pace.md, `drafts.next`",
        "$ outrider plan target.replica=2\noutrider: target.replica=2 is no setting",
        "`python -m bench`, `python -m bench NAME`, `python -m bench step --threads 1`",
    ],
)
def test_existing_target_is_let_through(text: str) -> None:
    assert not [*missing(text, ROOT / "README.md")]
