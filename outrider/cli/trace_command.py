"""``outrider trace FILE``: how the time of traced requests was spent."""

import argparse
from pathlib import Path

from outrider.cli.json_output import add_json, print_or_write
from outrider.cli.service import exit_code
from outrider.cli.trace_report import GENERATIONS, figures, lines, report
from outrider.telemetry.trace_file import FileSpan, read_spans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="written with OTEL_TRACES_EXPORTER=file"
    )
    parser.add_argument("--id", default=None, help="beginning of a trace id [the newest]")
    parser.add_argument("--all", action="store_true", help="all requests together")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    spans = [span for path in options.files for span in read_spans(path)]
    chosen = spans if options.all else _one(spans, options.id)
    found = report(chosen)
    if not found.generations:
        wanted = f" whose id begins with {options.id}" if options.id else ""
        raise ValueError(f"no generation{wanted} in {', '.join(map(str, options.files))}")
    trace_id = None if options.all else chosen[0].trace_id
    title = [] if trace_id is None else [f"trace {trace_id}"]
    print_or_write("\n".join([*title, *lines(found)]), figures(found, trace_id), options.json)
    return 0


def _one(spans: list[FileSpan], beginning: str | None) -> list[FileSpan]:
    """Returns the spans of the newest generation whose trace id has this beginning."""
    generations = [
        span
        for span in spans
        if span.name.startswith(GENERATIONS) and span.trace_id.startswith((beginning or "").lower())
    ]
    if not generations:
        return []
    newest = max(generations, key=lambda span: span.end)
    return [span for span in spans if span.trace_id == newest.trace_id]
