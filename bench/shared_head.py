"""What a Draft takes by a head that is whole in one process, and by one that two processes share.

`python -m bench shared_head`. An EAGLE-3 head as for a target with states of 2,048 numbers: each token reads
134 M random weights, float32, which takes longer than anything else. Whole, it would draft at rank 0 without
an exchange, as it does in one process. The target beside it is small, and its own steps are not counted.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bench.checkpoints import FOLDER
from bench.report import save, table
from bench.step import Stopwatch
from bench.tensor_parallel import RANKS, on_ranks
from outrider.decoding.draft import Draft
from outrider.decoding.settings import Sampling
from outrider.engine.drafters.beside_target import BesideTarget, beside_target
from outrider.engine.drafters.eagle3_head import Eagle3Head, Eagle3Shape
from outrider.engine.forward.forward_pass import ForwardPass
from outrider.engine.loading.head_checkpoint import HeadCheckpoint
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.parallel.follower import follow
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.settings import EngineSettings
from outrider.engine.work import Verified, Verify

DEPTH = 4
SEQUENCES = (1, 8)
PROMPT = tuple(range(10, 74))
SAMPLING = Sampling(temperature=0.7, max_tokens=1500, ignore_eos=True)
VOCABULARY = 32_000  # of the head's own output projection too, as heads of larger vocabularies have it
ATTENTION = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
HEAD = {**ATTENTION, "intermediate_size": 8192, "vocab_size": VOCABULARY}
READS = {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 0, 1]}


def target() -> Path:
    """Of one layer."""
    path = FOLDER / "beside-shared-head"
    if not (path / "config.json").exists():
        print(f"making {path}", flush=True)
        torch.manual_seed(0)
        small = {"intermediate_size": 2048, "num_hidden_layers": 1, "max_position_embeddings": 2048}
        tied = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "eos_token_id": None}
        LlamaForCausalLM(LlamaConfig(**ATTENTION, **small, **tied)).save_pretrained(path)
    return path


def head() -> Path:
    """Random: of what it guesses nothing is right, which changes no time."""
    path = FOLDER / "shared-head"
    if not (path / "model.safetensors").exists():
        print(f"making {path}", flush=True)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({**HEAD, **READS, "rms_norm_eps": 1e-5}))
        named = EngineSettings(model=str(target()), drafter="eagle3", head=str(path))
        torch.manual_seed(0)
        network = Eagle3Head(Eagle3Shape.of(HeadCheckpoint(named)), ATTENTION["hidden_size"], VOCABULARY)
        theirs = (("layer.", "midlayer."), ("attention.", "self_attn."))
        tensors = {}
        for name, tensor in network.state_dict().items():
            for ours, stored in theirs:
                name = name.replace(ours, stored) if name.startswith(("layer.", "midlayer.")) else name
            tensors[name] = tensor
        save_file(tensors, path / "model.safetensors")
    return path


def settings_of(threads: int, ranks: int) -> EngineSettings:
    named = {"model": str(target()), "drafter": "eagle3", "head": str(head())}
    given = {"dtype": "float32", "threads": threads, "cache_memory": 2**28, "self_check": False}
    return EngineSettings.model_validate({**named, **given, "tensor_parallel": ranks})


def taken(group: RankGroup | None, settings: EngineSettings, repetitions: int) -> list[dict[str, float]]:
    """By numbers of sequences: milliseconds of a Draft, and of taking in what a step committed, medians."""
    beside = beside_target(settings)
    assert beside is not None
    forward = ForwardPass(settings, group, beside)
    if group is not None and group.rank:
        follow(forward, group)
        return []
    engine = Engine(ModelRunner(forward, group), beside)
    rows = [_rounds(engine, beside, sequences, repetitions) for sequences in SEQUENCES]
    engine.shut_down()
    return rows


def _rounds(engine: Engine, beside: BesideTarget, sequences: int, repetitions: int) -> dict[str, float]:
    watches = {name: Stopwatch() for name in ("propose", "take_in")}
    originals = {name: getattr(beside, name) for name in watches}
    for name, watch in watches.items():
        setattr(beside, name, watch.wrap(originals[name]))
    opened = [engine.open(len(PROMPT), number, SAMPLING) for number in range(sequences)]
    drafts = {sequence.number: Draft() for sequence in opened}
    times: dict[str, list[float]] = {name: [] for name in watches}
    for number in range(repetitions + 2):
        before = {name: watch.seconds for name, watch in watches.items()}
        for one in opened:
            tokens = PROMPT if number == 0 else ()
            engine.submit(Verify(one.number, len(one.tokens), tokens, drafts[one.number], number + 1, DEPTH))
        while engine.has_work:
            for result in engine.step():
                assert isinstance(result, Verified)
                assert result.draft is not None
                drafts[result.sequence] = result.draft
        for name, watch in watches.items():
            times[name].append(watch.seconds - before[name])
    for one in opened:
        engine.close(one)
    for name, original in originals.items():
        setattr(beside, name, original)
    return {name: statistics.median(of_name[2:]) * 1e3 for name, of_name in times.items()}


def measure(threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Rows by number of sequences."""
    shared = on_ranks(taken, settings_of(threads, RANKS), repetitions)
    whole = taken(None, settings_of(threads, 1), repetitions)
    return [
        {
            "sequences": sequences,
            "whole: a Draft, ms": one["propose"],
            "shared: a Draft, ms": two["propose"],
            "shared / whole": two["propose"] / one["propose"],
            "whole: taking in, ms": one["take_in"],
            "shared: taking in, ms": two["take_in"],
        }
        for sequences, one, two in zip(SEQUENCES, whole, shared, strict=True)
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench shared_head", description="A head whole in one process, and shared by two."
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args(arguments)
    rows = measure(options.threads, options.repetitions)
    print(table(rows))
    print(save("shared_head", rows, threads_of_each_process=options.threads, tokens_of_a_draft=DEPTH))
