"""The tables of results in the docs and the README, from bench/results/*.json: `python -m bench tables`."""

from collections.abc import Sequence

from bench.report import parser_of
from bench.tables import results
from bench.tables.reading import source
from bench.tables.readme import summary
from workshop.pages.marks import DOCS, begin, rewritten

NAMES = ("benchmarks.md", "drafters.md", "gpu.md", "never-stalls.md")
PAGES = (*(DOCS / name for name in NAMES), DOCS.parent / "README.md")
COMMAND = "python -m bench tables"
# Tables of each benchmark; their functions have the names of their marks. Its source stands above the first.
OF_BENCHMARKS = {
    "engine": (results.engine_one_stream, results.engine_streams),
    "load": (results.load,),
    "simulate": (results.simulate,),
    "simulate_before": (results.simulate_before,),
    "mixture": (results.mixture,),
    "drafters": (
        results.drafters,
        results.drafters_acceptance,
        results.drafters_cost,
        results.drafters_united,
        results.drafters_predicted,
    ),
    "costs": (results.costs, results.costs_rounds),
    "stalls": (results.stalls,),
    "host": (results.host,),
    "peers": (results.peers,),
    "identity": (results.identity,),
    "batch_invariant": (results.batch_invariant,),
    "step": (results.step,),
    "gpu": (results.gpu_steps,),
    "on_device": (results.on_device_service, results.on_device_engine),
    "on_device_streams": (results.on_device_streams,),
}


def texts() -> dict[str, str]:
    """Returns the text between the marks of each table."""
    of_marks = {"summary": summary()}
    for benchmark, tables in OF_BENCHMARKS.items():
        of_marks |= {table.__name__: table() for table in tables}
        of_marks[tables[0].__name__] = source(benchmark) + tables[0]()
    return of_marks


def updated(page: str) -> str:
    """Returns the page with every table that it has marks for."""
    for mark, text in texts().items():
        if begin(mark, COMMAND) in page:
            page = rewritten(page, mark, COMMAND, text)
    return page


def main(arguments: Sequence[str]) -> None:
    parser_of("tables", __doc__).parse_args(arguments)
    for path in PAGES:
        path.write_text(updated(path.read_text()))
