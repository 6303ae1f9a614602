"""Generated parts of the docs. Each part is between two marks with its name."""

from pathlib import Path

COMMAND = "python -m workshop.pages"
DOCS = Path(__file__).parents[2] / "docs"


def begin(name: str, command: str) -> str:
    return f"<!-- {name}: written by {command} -->\n"


def end(name: str) -> str:
    return f"<!-- end of {name} -->\n"


def rewritten(page: str, name: str, command: str, text: str) -> str:
    """Returns the page with ``text`` between the marks of ``name``. Raises ValueError without marks."""
    first, last = begin(name, command), end(name)
    if page.count(first) != 1 or page.count(last) != 1:
        raise ValueError(f"the page must have these marks once: {first.strip()} and {last.strip()}")
    before, _, rest = page.partition(first)
    _, _, after = rest.partition(last)
    return f"{before}{first}{text}{last}{after}"
