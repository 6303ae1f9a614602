"""Every table by the mark that it stands at in the docs or the README."""

from collections.abc import Callable
from pathlib import Path

from bench.tables import (
    checking,
    costs,
    gpu,
    host,
    in_process,
    service,
    simulated,
    summary,
)
from bench.tables.reading import source
from workshop.pages.marks import begin, rewritten

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (DOCS / "benchmarks.md", DOCS / "checking.md", DOCS / "heads.md", ROOT / "README.md")
COMMAND = "python -m bench tables"

# Benchmark whose source stands above the table, or None if it stands there already; function of the table.
TABLES: dict[str, tuple[str | None, Callable[[], str]]] = {
    "engine_one_stream": ("engine", in_process.engine_one_stream),
    "engine_streams": (None, in_process.engine_streams),
    "load_closed": ("load", service.load_closed),
    "load_creative": (None, service.load_creative),
    "simulate": ("simulate", simulated.simulate),
    "simulate_ahead": (None, simulated.simulate_ahead),
    "costs": ("costs", costs.costs),
    "costs_rounds": (None, costs.costs_rounds),
    "ahead": ("ahead", service.ahead),
    "host": ("host", host.host),
    "host_costs": (None, host.host_costs),
    "peers": ("peers", host.peers),
    "identity": ("identity", in_process.identity),
    "batch_invariant": ("batch_invariant", in_process.batch_invariant),
    "step": ("step", in_process.step),
    "plain": ("plain", in_process.plain),
    "idle_head": ("idle_head", in_process.idle_head),
    "checking": ("checking", checking.checking),
    "gpu_steps": ("gpu", gpu.gpu_steps),
    "gpu_speculation": (None, gpu.gpu_speculation),
    "summary": (None, summary.summary),
}


def text_of(name: str) -> str:
    """Returns the text between the marks of a table."""
    bench, write = TABLES[name]
    return (source(bench) if bench else "") + write()


def updated(page: str) -> str:
    """Returns the page with every table that it has marks for."""
    for name in TABLES:
        if begin(name, COMMAND) in page:
            page = rewritten(page, name, COMMAND, text_of(name))
    return page
