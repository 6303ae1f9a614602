"""Every table by the mark that it stands at in the docs or the README."""

from collections.abc import Callable
from pathlib import Path

from bench.tables import (
    advice,
    checking,
    distil,
    drafters,
    gpu,
    host,
    in_process,
    service,
    simulated,
    summary,
)
from bench.tables.reading import source
from outrider.cli.pages import begin, rewritten

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "checking.md", ROOT / "README.md")
COMMAND = "python -m bench tables"

# By mark: the bench whose source is told above, None where it stands there already; and what writes it.
TABLES: dict[str, tuple[str | None, Callable[[], str]]] = {
    "start": ("start", host.start),
    "start_memory": (None, host.start_memory),
    "engine_one_stream": ("engine", in_process.engine_one_stream),
    "engine_costs": (None, in_process.engine_costs),
    "engine_streams": (None, in_process.engine_streams),
    "load_closed": ("load", service.load_closed),
    "load_tasks": (None, service.load_tasks),
    "load_creative": (None, service.load_creative),
    "load_crossing": (None, service.load_crossing),
    "load_open": (None, service.load_open),
    "simulate": ("simulate", simulated.simulate),
    "simulate_ahead": (None, simulated.simulate_ahead),
    "parallel": ("parallel", simulated.parallel),
    "beside": ("beside", simulated.beside),
    "early": ("early", simulated.early),
    "routing": ("routing", simulated.routing),
    "ahead": ("ahead", service.ahead),
    "ahead_rounds": (None, service.ahead_rounds),
    "ahead_distance": (None, service.ahead_distance),
    "ahead_crowd": (None, service.ahead_crowd),
    "service": ("service", service.service),
    "host": ("host", host.host),
    "host_costs": (None, host.host_costs),
    "transport": ("transport", host.transport),
    "peers": ("peers", host.peers),
    "wire": ("wire", host.wire),
    "identity": ("identity", in_process.identity),
    "structured": ("structured", in_process.structured),
    "structured_masks": (None, in_process.structured_masks),
    "batch_invariant": ("batch_invariant", in_process.batch_invariant),
    "suffix": ("suffix", in_process.suffix),
    "drafters": ("drafters", drafters.tokens_per_pass),
    "drafters_acceptance": (None, drafters.acceptance),
    "drafters_speed": (None, drafters.speed),
    "drafters_served": (None, drafters.served),
    "drafters_served_tokens": (None, drafters.served_tokens),
    "trees": ("trees", drafters.trees),
    "tree_times": (None, drafters.tree_times),
    "layerskip": ("layerskip", drafters.layerskip),
    "distil": ("distil", distil.distil),
    "distil_taken": (None, distil.distil_taken),
    "quantized_steps": ("quantized", in_process.quantized_steps),
    "quantized_acceptance": (None, in_process.quantized_acceptance),
    "step": ("step", in_process.step),
    "step_profile": (None, in_process.step_profile),
    "plain": ("plain", in_process.plain),
    "linear": ("linear", in_process.linear),
    "tensor_parallel": ("tensor_parallel", in_process.tensor_parallel),
    "tensor_parallel_alone": (None, in_process.tensor_parallel_alone),
    "shared_head": ("shared_head", in_process.shared_head),
    "tracing": ("tracing", host.tracing),
    "tracing_costs": (None, host.tracing_costs),
    "sampling": ("sampling", in_process.sampling),
    "metrics": ("metrics", host.metrics),
    "checking": ("checking", checking.checking),
    "advice": ("advise", advice.advice),
    "advice_summary": (None, advice.advice_summary),
    "gpu_steps": ("gpu", gpu.gpu_steps),
    "gpu_speculation": (None, gpu.gpu_speculation),
    "gpu_prompts": (None, gpu.gpu_prompts),
    "summary": (None, summary.summary),
}


def text_of(name: str) -> str:
    """What stands between the marks of that table."""
    bench, write = TABLES[name]
    return (source(bench) if bench else "") + write()


def updated(page: str) -> str:
    """With every table that it has marks for."""
    for name in TABLES:
        if begin(name, COMMAND) in page:
            page = rewritten(page, name, COMMAND, text_of(name))
    return page
