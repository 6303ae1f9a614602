"""Tables of model families in docs/models.md, from transformers' configs and the engine's checks of them.

Each family is built of fake tensors, with few layers and otherwise transformers' default sizes.
"""

import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from outrider.engine.drafters.mtp_checkpoint import built, probed
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.forward.batch_invariant import are_experts, why_rows_mix
from outrider.engine.forward.kernel import why_no_gpu_kernel
from outrider.engine.loading.shares import check_shares
from outrider.engine.loading.weights import attach
from outrider.engine.models.registry import architecture_of, mixtures_in
from outrider.engine.parallel.plan import use_own_plan
from outrider.engine.planning.skeleton import ModelSkeleton
from outrider.engine.settings import EngineSettings
from workshop.markdown import table
from workshop.pages.marks import COMMAND, DOCS, rewritten

PAGE, MARK = "models.md", "families"
LAYERS = 4  # enough to include each kind of layer once
RANKS = 2
TYPE = torch.bfloat16  # dtype of the fake tensors: experts accept no other dtype

# Matches the names of an MTP layer's tensors among the names that transformers' model ignores.
CARRIED = re.compile(r"mtp|layers")

FAMILIES = {  # published families by type of text config
    "llama": "Llama 2 to 3.3",
    "mistral": "Mistral, the text of Mistral Small 3",
    "mixtral": "Mixtral",
    "qwen2": "Qwen 2, 2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen 3.5",
    "qwen3_5_moe_text": "Qwen 3.5, mixtures",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "glm4_moe": "GLM-4.5 to 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "minimax_m2": "MiniMax M2",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek V3, R1",
    "gemma2": "Gemma 2",
    "gemma3_text": "the text of Gemma 3",
    "gemma4_text": "the text of Gemma 4",
    "phi3": "Phi-3, Phi-4-mini",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "seed_oss": "Seed-OSS",
    "mistral4": "Mistral Small 4",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "glm_moe_dsa": "GLM-5",
    "kimi_linear": "Kimi Linear",
}


@dataclass(frozen=True)
class Family:
    """Support of the engine for models of one type."""

    refused_because: str | None  # None: the family is served
    is_fast: bool = False  # whether the fast decoder runs them
    ranks: str = ""
    quantized: str = ""
    batch_invariant: str = ""
    has_mtp: bool = False  # whether the drafter `mtp` can use a layer of their checkpoints


def family_of(kind: str) -> Family:
    """Returns the engine's support for a model type, named as in transformers."""
    config = CONFIG_MAPPING[kind](num_hidden_layers=LAYERS)
    use_own_plan(config)
    try:
        skeleton = ModelSkeleton(config, kind, TYPE)
    except UnsupportedModelError as refusal:
        return Family(str(refusal).partition(f"a {kind}, ")[2] or str(refusal))
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=TYPE).eval()
        attach(model, kind)
    architecture = architecture_of(model)
    return Family(
        None,
        architecture is not None and getattr(config, architecture.activation) == "silu",
        _ranks(config, skeleton),
        _quantized(model),
        _batch_invariant(model, skeleton),
        _has_mtp(config, model),
    )


def _ranks(config: Any, skeleton: ModelSkeleton) -> str:
    with TemporaryDirectory() as folder:
        deepcopy(config).save_pretrained(folder)
        try:
            check_shares(EngineSettings(model=str(Path(folder)), tensor_parallel=RANKS))
        except UnsupportedModelError:
            return "no"
    if skeleton.layers_of(RANKS) == skeleton.layers_of(1):
        return "weights"
    return "weights, cache"


def _quantized(model: Any) -> str:
    has_experts = any(are_experts(path, module) for path, module in model.named_modules())
    return "all but experts" if has_experts and not any(mixtures_in(model)) else "all"


def _batch_invariant(model: Any, skeleton: ModelSkeleton) -> str:
    if why_rows_mix(model) is not None:
        return "no"
    return "yes" if why_no_gpu_kernel(skeleton.layers) is None else "on a CPU"


def _has_mtp(config: Any, model: Any) -> bool:
    """Whether checkpoints have an MTP layer, which transformers ignores, and the layer runs here."""
    passed_over = model._keys_to_ignore_on_load_unexpected or ()
    if not any(CARRIED.search(pattern) for pattern in passed_over):
        return False
    try:
        with FakeTensorMode():
            _, layer = built(deepcopy(config), TYPE)
            probe = probed(layer, config.hidden_size)
    except Exception:  # a layer may raise anything
        return False
    return [*probe.shapes] == [0] and not probe.needs


def families() -> str:
    """Returns a table of families that are served, and a table of families that are refused."""
    found = {kind: family_of(kind) for kind in FAMILIES}
    served = [
        [
            FAMILIES[kind],
            f"`{kind}`",
            "yes" if family.is_fast else "no",
            family.ranks,
            family.quantized,
            family.batch_invariant,
            "`mtp`" if family.has_mtp else "",
        ]
        for kind, family in found.items()
        if family.refused_because is None
    ]
    refused = [
        [FAMILIES[kind], f"`{kind}`", family.refused_because]
        for kind, family in found.items()
        if family.refused_because is not None
    ]
    columns = ["fast decoder", "ranks share", "weights kept as stored", "batch-invariant", "its own drafter"]
    of_served = table(["served", "type", *columns], served)
    return f"{of_served}\n{table(['refused', 'type', 'because it'], refused)}"


def pages() -> dict[str, str]:
    """Returns the rewritten page by its name. Raises ValueError if the page has lost its marks."""
    return {PAGE: rewritten((DOCS / PAGE).read_text(), MARK, COMMAND, families())}
