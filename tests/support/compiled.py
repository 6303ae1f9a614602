"""Compiles kernels for GPUs that may be absent, and prints the report of ptxas as JSON.

It runs in a process of its own, because Triton may be in interpreter mode in the process of the tests.
TRITON_INTERPRET=0 must be set.
"""

import json
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from outrider.engine.inputs import choice_input
from outrider.engine.inputs.context_parts import third_length
from outrider.engine.inputs.paged_input import (
    ADAPTER_TILE,
    FEW_QUERIES,
    FEW_TILE,
    MANY_TILE,
    NO_ROOT,
    SPLIT_TILES,
    TILE_FIELDS,
    split_tiles_of,
)
from outrider.engine.inputs.told_tokens import TOLD
from outrider.engine.kernels import (
    advance,
    attend_tile,
    block_tables,
    choice,
    delta_net,
    experts,
    joined_parts,
    layer,
    low_rank,
    mamba2,
    paged_attention,
    recurrent,
    rounds_ahead,
    stored_product,
    verdict,
)

TYPES = {
    "logits": "*bf16",
    "row_stride": "i32",
    "allowed": "*i32",
    "integers": "*i64",
    "numbers": "*fp64",
    "num_rows": "i32",
    "vocab_size": "i32",
    "statistics": "*fp32",
    "block_maxima": "*i64",
    "candidates": "*i64",
    "counts": "*i32",
    "ranks": "i32",
    "top_tokens": "*i32",
    "perturbed": "*fp32",
    "are_valid": "*i1",
    "drafts": "*i64",
    "depth": "i32",
    "are_accepted": "*i1",
}
CONSTANTS = {
    "CAPACITY": choice_input.CAPACITY,
    "ID_BITS": 17,
    "CHUNK": choice_input.CHUNK,
    "BLOCK": choice_input.BLOCK,
    "CHUNKS": 32,
    "CHUNKS_PADDED": 32,
}
ALIGNED = {"row_stride", "vocab_size", *(name for name, kind in TYPES.items() if kind.startswith("*"))}


# A tile for decoding and verifying in the shape of Llama 3 8B.
TILE_TYPES = {
    **dict.fromkeys(("query", "keys", "values", "output"), "*bf16"),
    **dict.fromkeys(("tiles", "work", "seen", "ancestors", "paths", "positions"), "*i64"),
    **dict.fromkeys(("block_tables", "new_blocks", "windowed"), "*i32"),
    **dict.fromkeys(("parts", "weights"), "*fp32"),
    **dict.fromkeys(
        (
            "rows",
            "query_head_stride",
            "query_row_stride",
            "table_stride",
            "words",
            "path_length",
            "splits",
        ),
        "i32",
    ),
    "scale": "fp32",
}
TILE_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("sinks", "softcap", "window")),
    **dict.fromkeys(("KEY_DIM", "VALUE_DIM", "KEY_WIDTH", "VALUE_WIDTH"), 128),
    **dict.fromkeys(("WINDOW", "WINDOWED", "SOFTCAP", "SINKS"), False),
    "HEADS": 32,
    "KV_HEADS": 8,
    "REPEATS": 4,
    "GROUP": 4,
    "BLOCK": 16,
    "FIELDS": TILE_FIELDS,
    "M": 4 * FEW_TILE,
    **{"ROTATED": 0, "ROTATED_WIDTH": paged_attention.LEAST_LINES, "CUTS": 1, "SPLIT": SPLIT_TILES},
    "TILE": FEW_TILE,
    "THIRD": third_length(131_072),
    "PRECISION": "tf32",
}
TILE_ALIGNED = {
    "query_head_stride",
    "query_row_stride",
    *(n for n, kind in TILE_TYPES.items() if "*" in kind),
}
# A layer of Llama 3 8B without its matrix products, and the sum over eight ranks of a 70B.
LAYER_TYPES = {
    **dict.fromkeys(
        ("rows", "weight", "output", "product", "cosines", "sines", "query", "keys", "values", "gate_up"),
        "*bf16",
    ),
    **dict.fromkeys(("parts", "states"), "*bf16"),
    "slots": "*i64",
    "stride": "i32",
    "output_stride": "i32",
    **dict.fromkeys(("epsilon", "key_factor", "value_factor"), "fp32"),
}
LAYER: dict[str, dict[str, Any]] = {
    "_norm": {"SIZE": 4096, "WIDTH": 4096},
    "_sum_and_norm": {"RANKS": 8, "SIZE": 8192, "WIDTH": 8192},
    "_rotate_and_store": {
        "HEADS": 32,
        "KV_HEADS": 8,
        "DIM": 128,
        "TURNING": 128,
        "WIDTH": 128,
        "TILE": layer.HEADS_AT_ONCE,
    },
    "_gate": {"SIZE": 14336, "WIDTH": layer.NUMBERS_AT_ONCE},
}
LAYER_WARPS = {"_norm": 8, "_sum_and_norm": 16}
PROMPT = {"THIRD": 0, "M": paged_attention.MANY.lines, "GROUP": 2, "TILE": MANY_TILE}
WINDOW = {"WINDOW": True, "window": 4096}
POOL = {**WINDOW, "WINDOWED": True}
LATENT, ROTATED = 512, 64  # dimensions of DeepSeek-V3, Kimi K2 and GLM-4.7-Flash


def of_latents(heads: int, tiling: paged_attention.Tiling) -> dict[str, Any]:
    """Returns the constants with which a program attends to latents. heads: query heads of a rank."""
    dims = {"KEY_DIM": LATENT + ROTATED, "ROTATED": ROTATED, "ROTATED_WIDTH": ROTATED}
    dims |= dict.fromkeys(("VALUE_DIM", "KEY_WIDTH", "VALUE_WIDTH"), LATENT)
    work = {"TILE": tiling.rows, "M": tiling.lines, "CUTS": heads * tiling.rows // tiling.lines}
    shared = {"KV_HEADS": 1, "REPEATS": heads, "GROUP": heads, "CHAINS": False}
    return {**dims, **work, **shared, "SPLIT": split_tiles_of(heads, caches_latents=True)}


TILES: dict[str, dict[str, Any]] = {
    "trees": {"CHAINS": False},
    "chains": {"CHAINS": True},
    "prompts": {"CHAINS": False, **PROMPT},
    "prompts by window": {"CHAINS": False, **PROMPT, **WINDOW},
    "trees by window": {"CHAINS": False, **WINDOW},
    "prompts in a pool for windows": {"CHAINS": False, **PROMPT, **POOL},
    "trees in a pool for windows": {"CHAINS": False, **POOL},
    "chains in a pool for windows": {"CHAINS": True, **POOL},
    "trees of a narrow cache": {"CHAINS": False},
    "prompts of a narrow cache": {"CHAINS": False, **PROMPT},
    # One of four ranks of Llama 3 70B.
    "shared heads": {"CHAINS": False, "KV_HEADS": 2, "REPEATS": 8},
    # DeepSeek-V3 on a device, and a rank of eight that share its heads.
    "latents of 128 heads": of_latents(128, paged_attention.FEW_OF_LATENTS),
    "latents": of_latents(16, paged_attention.FEW_OF_LATENTS),
    "latents as chains": {**of_latents(16, paged_attention.FEW_OF_LATENTS), "CHAINS": True},
    "latents of a narrow cache": of_latents(16, paged_attention.FEW_OF_LATENTS),
    "latents of prompts": {**of_latents(16, paged_attention.MANY_OF_LATENTS), "THIRD": 0},
    "latents of prompts and a narrow cache": {**of_latents(16, paged_attention.MANY_OF_LATENTS), "THIRD": 0},
}
# Sequences of a draft with a context of 131,072 tokens.
CHAIN_TYPES = {
    **dict.fromkeys(("logit_rows", "seen", "sequence_lanes", "token_ids", "position_ids", "slots"), "*i64"),
    **dict.fromkeys(("work", "tiles", "integers", "progress"), "*i64"),
    **dict.fromkeys(("next_seen", "next_integers", "last_rows", "ends", "lanes", "drafts", "moves"), "*i64"),
    **dict.fromkeys(("numbers", "next_numbers"), "*fp64"),
    **dict.fromkeys(("top_tokens", "found", "block_tables", "told"), "*i32"),
    **dict.fromkeys(("are_finite", "are_valid", "are_accepted"), "*i1"),
    **dict.fromkeys(("num_sequences", "num_rows", "ranks", "stride"), "i32"),
}
CHAINS = {
    "BLOCK": 16,
    "BLOCKS": 8192,
    "RANKS": 6,
    "FIELDS": TILE_FIELDS,
    "SPARE_SLOT": 2**20,
    "NO_ROOT": NO_ROOT,
    "LANES": advance.LANES,
}
# Matrix product for queries, keys and values in Llama 3 8B: for few rows, for some, and for a prompt.
STORED_TYPES = {
    **dict.fromkeys(("rows", "bias", "added", "output"), "*bf16"),
    "codes": "*u8",
    "scales": "*bf16",
    "zeros": "*i16",
    "factors": "*fp32",
    "num_rows": "i32",
}
STORED: dict[str, tuple[dict[str, Any], set[str]]] = {  # constants, and parts of the stored weights
    "fp8": ({"KIND": "e4m3", "GROUP": 4096, "SPAN": 128, "SPANS": 1, "SHARED": 1}, {"factors"}),
    "fp8 in blocks": ({"KIND": "e4m3", "GROUP": 128, "SPAN": 128, "SPANS": 1, "SHARED": 1}, {"scales"}),
    "int4": ({"KIND": "int4", "GROUP": 128, "SPAN": 128, "SPANS": 1, "SHARED": 2}, {"scales", "zeros"}),
    "mxfp4": ({"KIND": "e2m1", "GROUP": 32, "SPAN": 32, "SPANS": 4, "SHARED": 2}, {"scales"}),
    "nvfp4": ({"KIND": "e2m1", "GROUP": 16, "SPAN": 16, "SPANS": 8, "SHARED": 2}, {"scales", "factors"}),
}
# Experts of Qwen3-30B-A3B; their product for gate and up has two accumulators.
EXPERT_TYPES = {
    **STORED_TYPES,
    **dict.fromkeys(("logits", "correction", "weights"), "*fp32"),
    "chosen": "*i64",
    **dict.fromkeys(("pairs", "begin", "read"), "*i32"),
    "products": "*bf16",
    "num_pairs": "i32",
    "scaling": "fp32",
}
EXPERTS: dict[str, dict[str, Any]] = {
    "_route": {"EXPERTS": 128, "WIDTH": 128, "SLOTS": 8, "SLOT_WIDTH": 8, "SCORES": "sigmoid"}
    | {"GROUPS": 8, "KEPT": 4, "GROUP_WIDTH": 8, "NORMALIZED": True},
    "_sort": {"EXPERTS": 128, "WIDTH": experts.PAIRS_AT_ONCE},
    "_add_up": {"SLOTS": 8, "SIZE": 2048, "WIDTH": experts.NUMBERS_AT_ONCE},
}
EXPERT_WARPS = {"_route": 1}
PLAIN = {"KIND": "plain", "GROUP": 2048, "SPAN": 64, "SPANS": 1, "SHARED": 1}
CHOSEN = {"plain": (PLAIN, set[str]()), **STORED}
SLOTS = {89: 32, 90: 128}  # cache slots at a time by compute capability, as many as fit into shared memory


def of_choice(kernel: Any, capability: int) -> dict[str, int]:
    options = {"num_warps": choice.WARPS, "enable_fp_fusion": False}
    return compiled(kernel, capability, TYPES, CONSTANTS, ALIGNED, options)


def of_verdict(capability: int) -> dict[str, int]:
    return compiled(verdict.find_path, capability, TYPES, {"BLOCK": verdict.PROGRAM_ROWS}, ALIGNED, {})


def of_reading(capability: int) -> dict[str, int]:
    """Compiles the kernel that reads the Verdicts of chains."""
    aligned = {name for name, kind in CHAIN_TYPES.items() if kind.startswith("*")}
    constants = {"BLOCK": FEW_QUERIES, "TELLS": len(TOLD)}
    return compiled(verdict.follow_chains, capability, CHAIN_TYPES, constants, aligned, {})


def of_moving(capability: int) -> dict[str, int]:
    """Compiles the kernel that advances rounds past their Verdicts."""
    aligned = {name for name, kind in CHAIN_TYPES.items() if kind.startswith("*")}
    constants = {**CHAINS, "ROWS": FEW_QUERIES, "TELLS": len(TOLD)}
    return compiled(rounds_ahead.move_rounds, capability, CHAIN_TYPES, constants, aligned, {"num_warps": 1})


def of_chains(kernel: Any, capability: int) -> dict[str, int]:
    aligned = {name for name, kind in CHAIN_TYPES.items() if kind.startswith("*")}
    return compiled(kernel, capability, CHAIN_TYPES, CHAINS, aligned, {})


def of_attention(capability: int, *, is_narrow: bool, **constants: Any) -> dict[str, int]:
    constants = {**TILE_CONSTANTS, "N": SLOTS[capability], **constants}
    tiling = paged_attention.FEW if constants["THIRD"] else paged_attention.MANY
    if constants["ROTATED"]:
        tilings = paged_attention.FEW_OF_LATENTS, paged_attention.MANY_OF_LATENTS
        tiling = tilings[constants["THIRD"] == 0]
    most = paged_attention.FEWER_SLOTS if constants["WINDOW"] or is_narrow else tiling.slots
    constants["N"] = min(constants["N"], tiling.slots, most)
    options = {
        "num_warps": tiling.warps,
        "num_stages": attend_tile.STAGES,
        "maxnreg": paged_attention.MOST_REGISTERS,
        "enable_fp_fusion": False,
    }
    kernel = attend_tile.attend_tile
    types = {**TILE_TYPES, **dict.fromkeys(("keys", "values"), "*u8")} if is_narrow else TILE_TYPES
    return compiled(kernel, capability, types, constants, TILE_ALIGNED, options)


def of_new_blocks(capability: int) -> dict[str, int]:
    constants = {"AT_ONCE": block_tables.NEW_BLOCKS_AT_ONCE}
    return compiled(block_tables.take_in_blocks, capability, TILE_TYPES, constants, TILE_ALIGNED, {})


def of_joining(capability: int, **constants: Any) -> dict[str, int]:
    kernel, options = joined_parts.join_parts, {"num_warps": 4, "enable_fp_fusion": False}
    constants = {**TILE_CONSTANTS, **constants}
    return compiled(kernel, capability, TILE_TYPES, constants, TILE_ALIGNED, options)


def of_layer(name: str, capability: int, *, is_narrow: bool = False) -> dict[str, int]:
    types = {**LAYER_TYPES, **dict.fromkeys(("keys", "values"), "*u8")} if is_narrow else LAYER_TYPES
    options = {"num_warps": LAYER_WARPS.get(name, 4)}
    aligned = set(LAYER_TYPES) - {"epsilon", "key_factor", "value_factor"}
    kernel, constants = getattr(layer, name), LAYER[name]
    # Triton specializes an integer argument of 1 to a constant, which supports fewer operations.
    ones = {argument: 1 for argument, kind in types.items() if kind == "i32"}
    others = {argument: kind for argument, kind in types.items() if argument not in ones}
    compiled(kernel, capability, others, {**constants, **ones}, aligned - set(ones), options)
    return compiled(kernel, capability, types, constants, aligned, options)


def of_stored(form: str, tiling: stored_product.ProductTiling, capability: int) -> dict[str, int]:
    constants, parts = STORED[form]
    missing = {"scales", "zeros", "factors", "bias"} - parts
    types = {name: kind for name, kind in STORED_TYPES.items() if name not in missing}
    sizes = {"OUTPUTS": 6144, "INPUTS": 4096, "TILE": tiling.outputs, "ROWS": tiling.rows}
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": True}
    constants = {**constants, **sizes, **dict.fromkeys(missing)}
    return compiled(
        stored_product._multiply, capability, types, constants, set(types) - {"num_rows"}, options
    )


def of_experts(name: str, capability: int) -> dict[str, int]:
    aligned = {name for name, kind in EXPERT_TYPES.items() if "*" in kind}
    options = {"num_warps": EXPERT_WARPS.get(name, 4)}
    return compiled(getattr(experts, name), capability, EXPERT_TYPES, EXPERTS[name], aligned, options)


def of_chosen(form: str, tiling: stored_product.ProductTiling, capability: int) -> dict[str, int]:
    """Compiles the product of chosen experts for gate and up."""
    constants, parts = CHOSEN[form]
    missing = {"scales", "zeros", "factors", "bias"} - parts
    types = {name: kind for name, kind in EXPERT_TYPES.items() if name not in missing}
    types |= {"codes": "*bf16"} if form == "plain" else {}
    sizes = {"EXPERTS": 128, "WIDTH": 128, "SLOTS": 8, "OUTPUTS": 768, "INPUTS": 2048, "GATED": True}
    constants = {**constants, **sizes, "SLOPE": 1.702, "LIMIT": 7.0, **dict.fromkeys(missing)}
    constants |= {"TILE": tiling.outputs, "ROWS": tiling.rows}
    options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": True}
    aligned = {name for name, kind in types.items() if "*" in kind}
    return compiled(experts._multiply_chosen, capability, types, constants, aligned, options)


def compiled(
    kernel: Any,
    capability: int,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: set[str],
    options: dict[str, Any],
) -> dict[str, int]:
    """Returns registers and spilled bytes per thread, shared memory per program, and wgmma instructions.

    capability: compute capability, 90 for 9.0.
    """
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={name: constants[name] for name in names if name in constants},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in aligned},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(found.asm["ptx"])
        file.flush()
        arch = re.search(r"\.target (\w+)", found.asm["ptx"])
        assert arch is not None
        command = [get_ptxas(capability).path, "-v", f"-arch={arch[1]}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return {
        "registers": int(registers),
        "spilled": spilled,
        "shared": found.metadata.shared,
        "wgmma": found.asm["ptx"].count("wgmma.mma_async"),
    }


RECURRENT_TYPES = {
    **dict.fromkeys(("fed", "ring", "tails", "output", "copies"), "*bf16"),
    **dict.fromkeys(("states", "kept", "taps", "bias", "slope", "shift", "skip"), "*fp32"),
    **dict.fromkeys(("sequences", "operations", "sources"), "*i64"),
    **dict.fromkeys(("fed_stride", "channels", "ring_rows", "tail_rows"), "i32"),
    **dict.fromkeys(("least_step", "most_step"), "fp32"),
}
RECURRENT = {  # kernels, with the sizes of a layer of Qwen3-Next and of Nemotron 3 Nano
    delta_net.advance_delta_nets: {
        **{"HEADS": 32, "REPEATS": 2, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_WIDTH": 128, "TAPS": 4},
        "VALUE_WIDTH": delta_net.VALUES,
    },
    mamba2.advance_mamba2: {
        **{"HEADS": 64, "REPEATS": 8, "HEAD_DIM": 64, "STATE_SIZE": 128, "SIZE_WIDTH": 128, "TAPS": 4},
        "DIM_WIDTH": mamba2.INPUTS,
    },
    recurrent.copy_sources: {"COPIED": recurrent.COPIED},
}


def of_recurrent(kernel: Any, capability: int) -> dict[str, int]:
    aligned = {name for name, kind in RECURRENT_TYPES.items() if kind.startswith("*")}
    options = {"num_warps": delta_net.WARPS}
    return compiled(kernel, capability, RECURRENT_TYPES, RECURRENT[kernel], aligned, options)


# Adapters of rank 16 for queries, keys and values of Llama 3 8B.
LOW_RANK_TYPES = {
    **dict.fromkeys(("rows", "output"), "*bf16"),
    **dict.fromkeys(("table", "adapter_rows", "adapter_tiles"), "*i64"),
    "parts": "*fp32",
}
LOW_RANK_SIZES = {"INPUTS": 4096, "OUTPUTS": 6144, "PARTS": 4, "RANKS": 48, "PART": low_rank.PART}
LOW_RANK_SIZES |= {"TILE": low_rank.TILE, "ROWS": ADAPTER_TILE}
LOW_RANK: dict[str, dict[str, int]] = {
    "shrink_rows": {"SPAN": low_rank.SPAN},
    "expand_rows": {"SPAN": low_rank.RANKS_AT_ONCE},
}


def of_low_rank(name: str, capability: int) -> dict[str, int]:
    options = {"num_warps": low_rank.WARPS, "num_stages": low_rank.STAGES}
    constants = {**LOW_RANK_SIZES, **LOW_RANK[name]}
    return compiled(
        getattr(low_rank, name), capability, LOW_RANK_TYPES, constants, set(LOW_RANK_TYPES), options
    )


if __name__ == "__main__":
    said = {
        f"{kernel.__name__} sm_{capability}": of_choice(kernel, capability)
        for kernel in (choice._scan, choice._collect, choice._choose)
        for capability in SLOTS
    }
    said |= {
        f"attend_tile {name} sm_{capability}": of_attention(
            capability, is_narrow="narrow" in name, **TILES[name]
        )
        for name in TILES
        for capability in SLOTS
    }
    said |= {f"take_in_blocks sm_{capability}": of_new_blocks(capability) for capability in SLOTS}
    said |= {f"join_parts sm_{capability}": of_joining(capability) for capability in SLOTS}
    said |= {
        f"join_parts of latents sm_{capability}": of_joining(
            capability, HEADS=16, VALUE_DIM=LATENT, VALUE_WIDTH=LATENT
        )
        for capability in SLOTS
    }
    said |= {f"{name} sm_{capability}": of_layer(name, capability) for name in LAYER for capability in SLOTS}
    said |= {
        f"_rotate_and_store narrow sm_{capability}": of_layer("_rotate_and_store", capability, is_narrow=True)
        for capability in SLOTS
    }
    said |= {
        f"{kernel.__name__} sm_{capability}": of_chains(kernel, capability)
        for kernel in (advance.begin_chains, advance.advance_chains)
        for capability in SLOTS
    }
    said |= {
        f"_multiply {form} {tiling.outputs} by {tiling.rows} sm_{capability}": of_stored(
            form, tiling, capability
        )
        for form in STORED
        for tiling in stored_product.TILINGS
        for capability in SLOTS
    }
    said |= {
        f"{name} sm_{capability}": of_experts(name, capability) for name in EXPERTS for capability in SLOTS
    }
    said |= {
        f"_multiply_chosen {form} {tiling.outputs} by {tiling.rows} sm_{capability}": of_chosen(
            form, tiling, capability
        )
        for form in CHOSEN
        for tiling in (experts.FEW, experts.MANY)
        for capability in SLOTS
    }
    said |= {
        f"{name} sm_{capability}": of_low_rank(name, capability) for name in LOW_RANK for capability in SLOTS
    }
    said |= {f"find_path sm_{capability}": of_verdict(capability) for capability in SLOTS}
    said |= {f"follow_chains sm_{capability}": of_reading(capability) for capability in SLOTS}
    said |= {f"move_rounds sm_{capability}": of_moving(capability) for capability in SLOTS}
    said |= {
        f"{kernel.__name__} sm_{capability}": of_recurrent(kernel, capability)
        for kernel in RECURRENT
        for capability in SLOTS
    }
    print(json.dumps(said))
