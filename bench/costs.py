"""Compares predicted with measured step times, and predicts a 70B deployment: `python -m bench costs`.

The first table compares the cost model (outrider/engine/planning/step_costs.py) with steps, answers and
prompts measured on an H100 (bench/results/gpu.json). The engine's host work took longer then. Steps on an
H200 follow, with the host work of today (bench/results/on_device.json). The second table predicts a round of
a 70B target on four H100 with a 1B draft. It does so for the engine before its first optimizations, for the
engine of today, and with planned optimizations.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from bench.checkpoints import DENSE_TWIN, LLAMAS, MIXTURE, llama_fields
from bench.report import parser_of, save, table
from bench.tables.reading import results
from bench.tables.results import GPU_MODELS
from outrider.demo.inflation import Size
from outrider.engine.planning.accelerators import ACCELERATORS, Accelerator
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.planning.step_costs import (
    ExchangeCosts,
    HostCosts,
    StepCosts,
    step_costs,
)
from outrider.engine.settings import EngineSettings, Quantization
from outrider.pace.acceptance import expected_tokens
from outrider.pace.step import StepSize

H100, H200, L4 = ACCELERATORS["H100"], ACCELERATORS["H200"], ACCELERATORS["L4"]
PROMPT, ANSWER, CHUNK = 200, 128, 512  # tokens of the measured answers
LONG = {"max_position_embeddings": 131072}
MAX_ROWS = 512  # rows of the largest CUDA graph at the time of the measurement
# Host time before its optimization, when the H100 was measured; from host_time on the simulated device.
FIRST_HOST = HostCosts(1.55e-3, 30e-6, 6e-6)
# The measured steps do not include scheduling and delivery of tokens.
FIRST_WITHOUT_SCHEDULING = HostCosts(1.0e-3, 20e-6, 6e-6)
WITHOUT_SCHEDULING = HostCosts(0.6e-3, 2.3e-6, 1.8e-6)
SHAPES = {
    **LLAMAS,
    "70B": llama_fields(Size(hidden=8192, layers=80, intermediate=28672, heads=64, kv_heads=8), **LONG),
    "block draft": llama_fields(
        Size(hidden=8192, layers=5, intermediate=28672, heads=64, kv_heads=8), **LONG
    ),
    "1B draft": {**LLAMAS["1B"], **LONG},
    "mixture": {**MIXTURE, "num_hidden_layers": 48, **LONG},  # Qwen3-30B-A3B
    "its dense twin": {**DENSE_TWIN, "num_hidden_layers": 48, **LONG},  # as many active weights per token
    "its draft": {**DENSE_TWIN, "num_hidden_layers": 1, **LONG},
}
# Kernel launches of a rank with transformers' layers, per layer and outside the layers:
# docs/tensor-parallelism.md.
LAYER_OF_TRANSFORMERS, PASS_OF_TRANSFORMERS = 43, 47
# Planned optimizations that change the costs of a step. The figures are estimates.
IN_RANK_ORDER = ExchangeCosts(5e-6, 0.6)  # our own kernel, which sums over NVLink in rank order
HOPS_S, FEWER_HOPS_S = 3e-3, 2e-3  # seconds of a round's messages with gateway and frontends, now and planned
DEPTH, ACCEPTANCE = 4, 0.8


@cache
def costs_of(name: str, devices: int = 1, quantization: Quantization | None = None) -> StepCosts:
    """Returns the costs of a model of these shapes in bfloat16 with the engine of today."""
    kind = Qwen3MoeConfig if name == "mixture" else LlamaConfig
    model = ModelSkeleton(kind(**SHAPES[name]), name, torch.bfloat16)
    settings = {"tensor_parallel": devices, "quantization": quantization, "is_draft": name.endswith("draft")}
    return step_costs(model, EngineSettings.model_validate({"model": "m", "device": "cuda", **settings}))


def repaired(costs: StepCosts) -> StepCosts:
    """Returns the costs after the planned optimizations."""
    return replace(costs, exchange=IN_RANK_ORDER)


@dataclass(frozen=True)
class FirstCosts(StepCosts):
    """Costs of the engine before its optimization: attention split a context of any length into 32 parts."""

    def _part(self, context: float) -> int:
        return LONG["max_position_embeddings"] // 32


def before(costs: StepCosts) -> StepCosts:
    """Returns the costs before optimization: ranks ran transformers' layers, Drafts waited for the host."""
    kernels = costs.layers * LAYER_OF_TRANSFORMERS + PASS_OF_TRANSFORMERS
    changed = {"kernels": kernels if costs.all_reduces else costs.kernels}
    return FirstCosts(**{**vars(costs), **changed, "host": FIRST_HOST, "following_host": FIRST_HOST})


def compared() -> list[dict[str, Any]]:
    """Returns a row for each measurement that the model can predict."""
    found = results("gpu")
    rows = [*_steps(found["steps"]), *_answers(found.get("speculation", ())), *_prompts(found["prompts"])]
    rows += _steps_of_today(results("on_device")["engine"])
    return [{**row, "predicted / measured": row["predicted ms"] / row["measured ms"]} for row in rows]


def _steps(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in measured:
        has_graphs = row["path"] == "graph"
        costs = replace(costs_of(row["model"]), host=FIRST_WITHOUT_SCHEDULING, has_graphs=has_graphs)
        what = f"step, {row['asked']}, {row['draft']}, {row['sampling']}"
        yield _step_row(what, row, costs, H100)


def _steps_of_today(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows for the steps of the pair in bfloat16."""
    for row in measured:
        if row["part"] == "steps" and "model" in row:
            named = {**row, "model": GPU_MODELS[row["model"]]}
            costs = replace(costs_of(named["model"]), host=WITHOUT_SCHEDULING)
            yield _step_row("step on an H200", named, costs, H200)


def _step_row(
    what: str, row: Mapping[str, Any], costs: StepCosts, accelerator: Accelerator
) -> dict[str, Any]:
    sequences, tokens = row["sequences"], row["tokens each"]
    size = StepSize(sequences, sequences * tokens, 0.0, sequences * PROMPT)
    return _row(what, row, f"{sequences} x {tokens}", costs.seconds(accelerator, size), row["ms"])


def _answers(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows for answers with the usual numerics: batch-invariant numerics would split a step."""
    for row in measured:
        if row.get("numerics") != "usual":
            continue
        costs, batch, depth = _when_measured(row), row["batch"], row["depth"]
        size = StepSize(batch, batch * (1 + depth), 0.0, batch * (PROMPT + ANSWER / 2))
        costs = replace(costs, has_graphs=size.tokens <= MAX_ROWS)
        seconds = ANSWER / row["tokens / pass"] * costs.seconds(H100, size, is_early=not depth)
        seconds += _prompt_s(costs, batch * PROMPT, PROMPT, CHUNK)
        measured_ms = 1e3 * batch * ANSWER / row["tokens/s"]
        yield _row("answer", row, f"{batch} x {1 + depth}", seconds, measured_ms)


def _prompts(measured: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in measured:
        seconds = _prompt_s(_when_measured(row), row["prompt"], row["prompt"], row["chunk"])
        shape = f"{row['prompt']} by {row['chunk']}"
        yield _row("prompt", row, shape, seconds, 1e3 * row["first token s"])


def _when_measured(row: Mapping[str, Any]) -> StepCosts:
    """Returns the costs of the row's model when the H100 was measured."""
    return replace(costs_of(row["model"]), host=FIRST_HOST, following_host=FIRST_HOST)


def _prompt_s(costs: StepCosts, tokens: int, length: int, chunk: int) -> float:
    """Returns the prefill seconds. A token attends to half of its prompt on average."""
    chunks = -(-tokens // chunk)
    size = StepSize(1, 0, tokens / chunks, length / 2)
    return chunks * replace(costs, has_graphs=False).seconds(H100, size)


def _row(what: str, row: Mapping[str, Any], shape: str, seconds: float, measured_ms: float) -> dict[str, Any]:
    """Returns a row. shape: sequences and tokens per sequence, or prompt length and chunk size."""
    found = {"what": what, "model": row["model"], "shape": shape}
    return {**found, "predicted ms": 1e3 * seconds, "measured ms": measured_ms}


def rounds() -> list[dict[str, Any]]:
    """Returns a row for each context and each stage of the engine: the costs of a round of one stream."""
    target, draft = costs_of("70B", 4), costs_of("1B draft")
    return [
        row
        for context in (PROMPT, 4096, 32768)
        for row in (
            _round("before", context, before(target), before(draft), HOPS_S, is_chained=False),
            _round("today", context, target, draft, HOPS_S),
            _round("all repairs", context, repaired(target), repaired(draft), FEWER_HOPS_S),
        )
    ]


def _round(
    stage: str,
    context: int,
    target: StepCosts,
    draft: StepCosts,
    hops_s: float,
    *,
    is_chained: bool = True,
) -> dict[str, Any]:
    """Returns a row. is_chained: whether later positions of a Draft do not wait for the host."""
    one = StepSize(1, 1, context_tokens=context)
    plain_s = target.seconds(H100, one, is_early=True)
    target_s = target.seconds(H100, replace(one, tokens=1 + DEPTH))
    drafting_s = draft.seconds(H100, one) + (DEPTH - 1) * draft.seconds(H100, one, is_early=is_chained)
    round_s = target_s + drafting_s + hops_s
    rate = expected_tokens(ACCEPTANCE, DEPTH) / round_s
    return {
        "engine": stage,
        "context": context,
        "target ms": 1e3 * target_s,
        "draft ms": 1e3 * drafting_s,
        "hops ms": 1e3 * hops_s,
        "round ms": 1e3 * round_s,
        "tokens/s": rate,
        "plain": 1 / plain_s,
        "to plain": rate * plain_s,
    }


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("costs", __doc__)
    parser.parse_args(arguments)
    rows = compared()
    print(table(rows))
    ratios = sorted(row["predicted / measured"] for row in rows)
    print(f"median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")
    of_rounds = rounds()
    print(f"\n70B on four H100, 1B on another, K = {DEPTH}, acceptance {ACCEPTANCE}:\n{table(of_rounds)}")
    print(save("costs", rows, rounds=of_rounds))
