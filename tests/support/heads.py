"""Heads for the demo target in published formats. Some of their guesses are correct."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.decoding.philox import noise_key
from outrider.decoding.settings import Sampling
from outrider.demo.prompts import DEMO
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.loop.engine import Engine
from outrider.engine.offline.speculate import OfflineRequest, generate
from outrider.engine.settings import EngineSettings
from tests.support.demo_pair import engine, prompt_of
from tests.support.target_drafters import drafters_with
from workshop.demo.pair import load_model

HEADS = 4
KINDS = ("json", "stories", "code")
RIDGE = 1e-2


@cache
def written_texts() -> list[list[int]]:
    """Returns prompts with the target's answers."""
    sampling = Sampling(max_tokens=100, ignore_eos=True, temperature=0.7)
    prompts = [prompt_of(kind, index) for kind in KINDS for index in range(3)]
    asked = [OfflineRequest(prompt, sampling, noise_key(1, 0, prompt)) for prompt in prompts]
    outputs = generate(engine("target"), None, asked, 0)
    return [[*prompt, *output.tokens] for prompt, output in zip(prompts, outputs, strict=True)]


@cache
def projections() -> list[torch.Tensor]:
    """Returns [HEADS][vocab_size, hidden_size] fitted by least squares.

    Head k predicts the token k + 2 positions after the token of its state.
    """
    texts = written_texts()
    model = load_model(DEMO / "target").float().eval()
    with torch.inference_mode():
        passes = [model(input_ids=torch.tensor([text]), output_hidden_states=True) for text in texts]
    states = [passed.hidden_states[-1][0] for passed in passes]
    made = []
    for head in range(HEADS):
        inputs = torch.cat([of_text[: -head - 2] for of_text in states])
        outputs = torch.cat([torch.tensor(text[head + 2 :]) for text in texts])
        wanted = torch.nn.functional.one_hot(outputs, 2048).float()
        gram = inputs.T @ inputs
        gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
        made.append(10.0 * torch.linalg.solve(gram, inputs.T @ wanted).T.contiguous())
    return made


def random_vocabulary(tokens: int, size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns tensors of a head whose vocabulary is a part of the target's, with a random projection."""
    token_ids = torch.randperm(2048, generator=generator)[:tokens].sort().values
    return {
        "lm_head.weight": torch.randn(tokens, size, generator=generator),
        "d2t": token_ids - torch.arange(tokens),
        "t2d": torch.zeros(2048, dtype=torch.bool).index_fill(0, token_ids, True),
    }


def medusa_tensors() -> dict[str, torch.Tensor]:
    """Returns weights with the authors' names: per head a residual layer close to zero, and a projection."""
    torch.manual_seed(0)
    tensors = {}
    for head, projection in enumerate(projections()):
        tensors[f"{head}.0.linear.weight"] = 1e-3 * torch.randn(256, 256)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(256)
        tensors[f"{head}.1.weight"] = projection
    return tensors


def write_medusa(folder: Path, form: str = "authors", **config: Any) -> Path:
    """Writes a checkpoint. form: authors, safetensors, or vllm."""
    folder.mkdir(exist_ok=True)
    tensors = medusa_tensors()
    if form == "authors":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif form == "safetensors":
        save_file(
            {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
    else:
        renamed = {}
        for name, tensor in tensors.items():
            head, layer, *rest = name.split(".")
            renamed[f"blocks.{head}.layers.0.{rest[-1]}" if layer == "0" else f"lm_heads.{head}.weight"] = (
                tensor
            )
        save_file(renamed, folder / "model.safetensors")
    # The authors' configs omit the vocabulary, and some have a wrong number of heads.
    told = {"medusa_num_heads": 2, "medusa_num_layers": 1, **config}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def refusal_of(drafter: str, folder: Path, **given: Any) -> str:
    """Returns the error for a head that does not suit the demo target. Asserts that it names the folder."""
    usual = {"model": str(DEMO / "target"), "cache_memory": 2**22}
    settings = EngineSettings.model_validate({**usual, **drafters_with(drafter, folder, **given)})
    with pytest.raises(UnsupportedModelError) as caught:
        Engine.from_settings(settings)
    assert str(folder) in str(caught.value)
    return str(caught.value)
