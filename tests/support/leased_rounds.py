"""Rounds under leases, and a target with a colocated draft model of nearly equal weights."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

import outrider.engine.colocated.colocated
from outrider.decoding.draft import Draft
from outrider.decoding.lease import Lease
from outrider.decoding.settings import Sampling
from outrider.engine.loop.engine import Engine
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Decode, Decoded
from tests.support.checkpoints import write_checkpoint
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.target_drafters import drafters_with

DEPTH = 3
PROMPTS = [tuple(range(start, start + 6)) for start in (3, 40, 80)]
SHARED: dict[str, Any] = {"temperature": 0.7, "max_tokens": 20, "ignore_eos": True}


@dataclass
class Text:
    """Results of the rounds of a sequence."""

    verdicts: list[tuple[int, ...]] = field(default_factory=list)  # tokens of each Verdict
    drafts: list[Draft | None] = field(default_factory=list)
    off_chain: int = field(default=0, compare=False)  # Verdicts with accepted nodes off the chain
    of_host: int = field(default=0, compare=False)  # Drafts whose tokens the host of a GPU chose


@dataclass(frozen=True)
class Asked:
    """Request for a text."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any] = field(default_factory=dict)  # overrides of SHARED
    after: int = 0  # steps of the engine before the request arrives


def write_pair(folder: Path) -> Path:
    """Writes a target, and a draft with nearly equal weights; returns their folder."""
    target = write_checkpoint(folder / "target", "llama", num_hidden_layers=1)
    shutil.copytree(target, folder / "draft")
    tensors = load_file(target / "model.safetensors")
    head = tensors["lm_head.weight"]
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"] = head + 0.4 * head.std() * noise
    save_file(tensors, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings_of_pair(folder: Path, **more: Any) -> EngineSettings:
    """Returns the settings of the target with the colocated draft."""
    given = {
        **drafters_with("colocated", folder / "draft"),
        "model": str(folder / "target"),
        "dtype": "float32",
        "block_size": 8,
        "cache_memory": 2**21,
        "prefill_chunk": 64,
        "max_sequences": 4,
        "self_check": False,
        **more,
    }
    return EngineSettings.model_validate(given)


@contextmanager
def without_tokenizers() -> Iterator[None]:
    """Context in which checkpoints without tokenizers are accepted as a pair."""
    with patch.object(outrider.engine.colocated.colocated, "check_vocabulary", lambda *_: None):
        yield


def texts(
    engine: Engine,
    asked: Sequence[Asked],
    alternatives: int = 0,
    leased: int = 64,
    before_step: Callable[[int], None] = lambda number: None,
) -> list[Text]:
    """Answers requests under leases. leased: tokens of a lease; another lease follows when it ends."""
    found, rounds, steps = dict[int, Text](), dict[int, int](), 0
    waiting = [*asked]

    def lease(length: int) -> Lease:
        return Lease(length + leased, DEPTH, alternatives, "colocated")

    while waiting or engine.has_work:
        for each in [each for each in waiting if each.after <= steps]:
            waiting.remove(each)
            prompt, sampling = each.prompt, Sampling(**{**SHARED, **each.sampling})
            sequence = engine.open(len(prompt), len(found) + 1, sampling)
            found[sequence.number], rounds[sequence.number] = Text(), 1
            engine.submit(Decode(sequence.number, 0, prompt, Draft(), 1, lease(len(prompt))))
        before_step(steps)
        steps += 1
        for result in engine.step():
            assert isinstance(result, Decoded)
            text, sequence = found[result.sequence], engine.sequence(result.sequence)
            before = text.drafts[-1] if text.drafts else None
            chain = 0 if before is None else before.chain_length
            text.off_chain += any(node >= chain for node in result.verdict.accepted)
            text.verdicts.append(result.verdict.tokens)
            text.drafts.append(result.draft)
            text.of_host += result.is_draft_of_host
            if result.finish is not None:
                engine.close(sequence)
            elif not result.continues:
                rounds[result.sequence] += 1
                length, draft = len(sequence.tokens), result.draft or Draft()
                work = Decode(result.sequence, length, (), draft, rounds[result.sequence], lease(length))
                engine.submit(work)
    return [*found.values()]


def rounds_begun(cuda: SimulatedCuda) -> int:
    return sum(count for cause, count in cuda.counts.launches.items() if "move_rounds" in cause)
