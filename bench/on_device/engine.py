"""Measures the engine's parts on a GPU, in one process: `python -m bench on_device engine`.

It uses the pair of `bench.on_device.pair`. The most informative parts come first.

- steps: plain and verifying steps, relative to the bandwidth limit, and the code path of each step;
- propose: a Draft of 1 to 8 tokens, device time alone and total time;
- attention: one layer over contexts of many lengths, compared with reading its keys and values once;
- decoder: kernels of a pass and their time, with the fast decoder and with transformers' layers;
- memory: memory of the process at the default settings, self-check included, beside the planned cache;
- rank: one rank of a 70 B on four GPUs, without all-reduces;
- quantized: the draft in 8 bit, 4 bit and FP8;
- experts: a model of the shape of Qwen3-30B-A3B with 12 layers;
- prompts: seconds to the first token, by prompt length and chunk size.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.checkpoints import LLAMAS, MIXTURE, linear_weights
from bench.engine import prompt_seconds
from bench.on_device import device_steps
from bench.on_device.figures import Rows, take_parts
from bench.on_device.pair import prompt
from outrider.engine.device_time import mark, seconds_between, wait_for
from outrider.engine.forward.graphs import CudaCapture
from outrider.engine.forward.kernel import find_kernel
from outrider.engine.held_blocks import HeldBlocks
from outrider.engine.inputs.step_input import Feed
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.work import Propose
from tests.support.paged_attention import moved, paged_input
from tests.support.quantized_checkpoints import quantize
from workshop.advice.steps import GREEDY, Steps
from workshop.memory import free_memory

SECONDS, PART_S = 480.0, 120.0
HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64), "rank of four of a 70B": (16, 2, 128)}  # heads, KV heads, dim
CONTEXT_LENGTH = 131_072  # longest sequence that the kernel supports, tokens
BLOCK = 16  # slots
ROUNDS = 8  # Drafts of each depth


SHAPES = ((1, 1), (1, 5), (8, 1), (8, 5), (64, 1), (64, 5), (64, 9), (256, 1))  # sequences, tokens of each
FEW_SHAPES = ((1, 1), (1, 2), (8, 1), (64, 1))  # shapes for the parts rank, quantized and experts
PROMPTS, CHUNKS = (4096, 32768), (512, 2048, 8192)  # tokens
SMALL_PROMPTS = (200,)  # tokens, with --small
PROPOSED = ((1, 1), *product((1, 8), range(2, 9)))  # sequences, depth of the Drafts
ATTENDED = tuple(product((1, 8), (200, 2048, 4096, 16384, 32768)))  # sequences, context tokens per sequence
RANK: dict[str, Any] = {
    **LLAMAS["8B"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 7168,
}
EXPERTS = {**MIXTURE, "model_type": "qwen3_moe", "num_hidden_layers": 12}
SMALL = {**LLAMAS["tiny"], "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 64}  # with --small


@cache
def bandwidth(device: str) -> float:
    """Returns bytes per second, and frees the measured buffer."""
    measured = device_steps.read_bandwidth(device)
    free_memory()
    return measured


def steps(options: argparse.Namespace) -> Rows:
    yield {"bandwidth, GB/s": bandwidth(options.device) / 1e9}
    for role in ("target", "draft"):
        limit = 2 * linear_weights(options.pair / role) / bandwidth(options.device)
        engine = device_steps.engine(options.pair / role, options.device)
        for shape in SHAPES[: options.most]:
            yield {"model": role, **device_steps.step_row(engine, shape, limit)}
        del engine
        free_memory()


def prompts(options: argparse.Namespace) -> Rows:
    for role, chunk in product(("target", "draft"), CHUNKS[: options.most]):
        engine = device_steps.engine(
            options.pair / role, options.device, prefill_chunk=chunk, graphs=False, max_sequences=16
        )
        for length in SMALL_PROMPTS if options.most else PROMPTS:
            numbered = [prompt(number, length, engine.vocab_size) for number in range(3)]
            taken = [prompt_seconds(engine, (*tokens,)) for tokens in numbered]
            yield {"model": role, "prompt": length, "chunk": chunk, "first token s": min(taken[1:])}
        del engine
        free_memory()


def propose(options: argparse.Namespace) -> Rows:
    engine = device_steps.engine(options.pair / "draft", options.device)
    for sequences, depth in PROPOSED[: options.most]:
        opened = [engine.open(len(device_steps.PROMPT), number, GREEDY) for number in range(sequences)]
        taken, on_device = [], []
        for round in range(device_steps.WARM_UPS + ROUNDS):
            started = time.perf_counter()
            for sequence in opened:
                base = len(sequence.tokens)
                # The sequence grows by the Draft's length and one token, as if the target had accepted it.
                length = len(device_steps.PROMPT) + round * (depth + 1)
                new = prompt(sequence.number, length, engine.vocab_size)[base:]
                engine.submit(Propose(sequence.number, base, (*new,), depth, round))
            results: list[Any] = []
            while engine.has_work:
                results += engine.step()
            taken.append(time.perf_counter() - started)
            on_device.append(results[0].timings.forward)
        for sequence in opened:
            engine.close(sequence)
        yield {
            "sequences": sequences,
            "depth": depth,
            "ms": statistics.median(taken[device_steps.WARM_UPS :]) * 1e3,
            "device ms": statistics.median(on_device[device_steps.WARM_UPS :]) * 1e3,
            "ms a token": statistics.median(taken[device_steps.WARM_UPS :]) * 1e3 / depth,
        }


def attention(options: argparse.Namespace) -> Rows:
    device, dtype = torch.device(options.device), getattr(torch, device_steps.DTYPE)
    for (name, heads), (sequences, context) in product(HEADS.items(), ATTENDED[: options.most]):
        taken, read = attention_seconds(heads, sequences, context, device, dtype)
        yield {
            "heads": name,
            "sequences": sequences,
            "context": context,
            "us": taken * 1e6,
            "limit, us": read / bandwidth(options.device) * 1e6,
        }


def attention_seconds(
    heads: tuple[int, int, int], sequences: int, context: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, int]:
    """Returns seconds of attention in one layer for a token per sequence, and bytes of keys and values."""
    query_heads, kv_heads, dim = heads
    shapes = {0: (kv_heads, dim, dim)}
    kernel = find_kernel(shapes, dtype, device, block_size=BLOCK, context_length=CONTEXT_LENGTH)
    assert not isinstance(kernel, str), kernel
    blocks = np.arange(sequences * -(-context // BLOCK)).reshape(sequences, -1)
    feeds = [Feed([0], 1, context - 1, HeldBlocks(own), None) for own in blocks]
    paged = moved(paged_input(feeds, BLOCK), device)
    query = torch.randn(query_heads, sequences, dim, dtype=dtype, device=device)
    keys, values = torch.randn(2, blocks.size * BLOCK, kv_heads, dim, dtype=dtype, device=device)

    def launch() -> None:
        for _ in range(device_steps.REPETITIONS):
            kernel(paged, query, keys, values)

    # A graph, because a launch from Python takes longer than the kernel for most of these contexts.
    take = CudaCapture()(launch) if device.type == "cuda" else launch
    take()
    started = mark(device)
    take()
    ended = mark(device)
    wait_for(ended)
    read = 2 * sequences * context * kv_heads * dim * query.element_size()
    return seconds_between(started, ended) / device_steps.REPETITIONS, read


def decoder(options: argparse.Namespace) -> Rows:
    none = patch.object(ForwardPass, "_decoder_of", lambda *_: None)
    for layers, way in (("decoder", nullcontext()), ("transformers", none)):
        with way:
            engine = device_steps.engine(options.pair / "target", options.device)
        yield {"layers": layers, **kernels_of(engine)}
        del engine
        free_memory()


def kernels_of(engine: Engine) -> dict[str, Any]:
    """Returns the number of kernels in a step of one token, and their time."""
    of_shape = Steps(engine, 1, 1, prompt=device_steps.PROMPT)
    of_shape.take()
    with torch.profiler.profile() as profile:
        taken = of_shape.take()
    of_shape.close()
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return {
        "ms": taken * 1e3,
        "kernels": len(kernels),
        "kernels, ms": sum(kernel.device_time for kernel in kernels) / 1e3,
    }


def memory(options: argparse.Namespace) -> Rows:
    """Loads the target as a deployment does: with the self-check, and a cache of all free memory."""
    engine = device_steps.engine(options.pair / "target", options.device, self_check=True)
    yield {"cache, bytes": engine.settings.cache_memory, "slow because": engine.runner.slow_because}
    yield {"seconds of loading": vars(engine.runner.load_timings)}
    if options.device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        yield {
            "allocated, bytes": torch.cuda.memory_allocated(),
            "reserved, bytes": torch.cuda.memory_reserved(),
            "most reserved, bytes": torch.cuda.max_memory_reserved(),
            "held of the device, bytes": total - free,
        }


def rank(options: argparse.Namespace) -> Rows:
    yield from random_steps(options, "rank", RANK)


def experts(options: argparse.Namespace) -> Rows:
    yield from random_steps(options, "experts", EXPERTS)


def random_steps(options: argparse.Namespace, name: str, shape: dict[str, Any]) -> Rows:
    """Yields step times of a model with random weights in a shape, and the kernels of a step."""
    path, shape = options.pair / name, shape | (SMALL if options.most else {})
    if not path.exists():
        write_random(path, shape, options.device)
        free_memory()
    limit = 2 * linear_weights(path) / bandwidth(options.device)
    engine = device_steps.engine(path, options.device)
    layers = {"layers": shape["num_hidden_layers"]}
    for few in FEW_SHAPES[: options.most]:
        yield {**layers, **device_steps.step_row(engine, few, limit)}
    yield {**layers, **kernels_of(engine)}


def write_random(path: Path, shape: dict[str, Any], device: str) -> None:
    config = AutoConfig.for_model(**shape, dtype=device_steps.DTYPE, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, device_steps.DTYPE))
    model.save_pretrained(path)


def quantized(options: argparse.Namespace) -> Rows:
    limit = 2 * linear_weights(options.pair / "draft") / bandwidth(options.device)
    for way in ("int8", "int4", "compressed fp8"):
        settings: dict[str, Any] = {"quantization": way}
        model: Path = options.pair / "draft"
        if way == "compressed fp8":
            settings, model = {}, options.pair / "fp8"
            if not model.exists():
                quantize(options.pair / "draft", way, model)
            model /= "quantized"
        try:
            engine = device_steps.engine(model, options.device, **settings)
        except Exception as error:
            yield {"weights": way, "skipped": repr(error)[-500:]}
            continue
        for shape in FEW_SHAPES[: options.most]:
            yield {"weights": way, **device_steps.step_row(engine, shape, limit)}
        del engine
        free_memory()


PARTS = {
    part.__name__: part
    for part in (steps, propose, attention, decoder, memory, rank, quantized, experts, prompts)
}


def main(arguments: Sequence[str]) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--small", action="store_const", const=1, dest="most", help="one of each kind")

    take_parts(__name__, PARTS, arguments, seconds=SECONDS, most_s=PART_S, add=add)
