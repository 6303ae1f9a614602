"""Ranks with a GPU each launch the next step before the host knows the tokens of this step.

GPUs and NCCL are simulated: tests/support/simulated_cuda/README.md.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoding.settings import Sampling
from outrider.engine.forward.output import ForwardOutput
from outrider.engine.loop.engine import Engine
from outrider.engine.loop.follower import follow
from outrider.engine.loop.forward_pass import ForwardPass
from outrider.engine.loop.load import load_forward_pass
from outrider.engine.loop.runner import ModelRunner
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.sequence import EngineSequence
from outrider.engine.settings import EngineSettings
from outrider.engine.work import plain_decoding
from tests.support.checkpoints import write_checkpoint
from tests.support.engine_runs import run, texts
from tests.support.ranks import Ranks
from tests.support.ranks_on_gpus import few_graphs, follow_on, simulated
from tests.support.simulated_cuda.counts import Counts
from tests.support.simulated_cuda.install import needs_compiler

pytestmark = needs_compiler

# So short that there are graphs for all of them together.
PROMPTS: list[tuple[int, ...]] = [(start, start + 1) for start in (3, 40, 80)]
COUNT = 6


def start(engine: Engine, prompt: tuple[int, ...], **given: Any) -> EngineSequence:
    """A text that goes on by so many tokens."""
    sampling = Sampling(**{"temperature": 0.7, "max_tokens": COUNT, "ignore_eos": True, **given})
    sequence = engine.open(len(prompt), prompt[0], sampling)
    engine.submit(plain_decoding(sequence.number, 0, prompt, COUNT))
    return sequence


def together(engine: Engine, prompts: list[tuple[int, ...]], **given: Any) -> list[list[int]]:
    """What is said to each of these."""
    sequences = [start(engine, prompt, **given) for prompt in prompts]
    results = run(engine)
    for sequence in sequences:
        engine.close(sequence)
    return texts(results, sequences)


def plainly(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    """Texts, and what they cost with steps launched early: of one sequence, of three and where one ends."""
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.launches_early = False
    in_turn = together(engine, PROMPTS)
    engine.runner.launches_early = True
    counts = []
    for prompts in (PROMPTS[:1], PROMPTS):
        simulated().counts = Counts()
        early = together(engine, prompts)
        counts.append((simulated().counts.totals(), simulated().counts.busy_waits.total()))
    ended = together(engine, PROMPTS, stop_token_ids=(in_turn[1][2],))
    load = engine.load()
    engine.shut_down()
    return in_turn, early, ended, counts, load.free_blocks == load.total_blocks


def shared_by_two(folder: Path) -> tuple[EngineSettings, EngineSettings]:
    """Settings of a small model: for one process on the CPU, and for two ranks on GPUs."""
    write_checkpoint(folder, "llama", num_hidden_layers=2)
    fields = {"model": str(folder), "dtype": "float32", "cache_memory": 2**21, "self_check": False}
    on_gpus = {**fields, "device": "cuda", "tensor_parallel": 2}
    return EngineSettings.model_validate(fields), EngineSettings.model_validate(on_gpus)


@pytest.mark.slow
def test_ranks_are_given_the_next_step_before_the_host_knows_the_tokens_of_this_one(
    gpu_ranks: Ranks, tmp_path: Path
) -> None:
    alone, shared = shared_by_two(tmp_path)
    expected = together(Engine.from_settings(alone), PROMPTS)
    [(in_turn, early, ended, counts, is_free), waits_of_the_other] = gpu_ranks.run(plainly, follow_on, shared)
    assert in_turn == early == expected
    stop = expected[1][2]
    assert ended == [text[: text.index(stop) + 1] if stop in text else text for text in expected]
    [(of_one, busy), (of_three, busy_with_three)] = counts
    assert of_one["waits"] == of_three["waits"] == COUNT
    assert busy == busy_with_three == COUNT - 1, "after the last there is none"
    assert of_one["launches"] == of_three["launches"]
    assert waits_of_the_other == 0
    assert is_free


def failing_early(forward: ForwardPass) -> list[bool]:
    """The second pass that is launched early raises. Returns, of each pass from now on, whether it was."""
    run_pass, passes = forward.run, list[bool]()

    def harmed(step: Any, chosen: torch.Tensor | None = None) -> ForwardOutput:
        passes.append(chosen is not None)
        if chosen is not None and passes.count(True) == 2:
            raise ZeroDivisionError
        return run_pass(step, chosen)

    forward.run = harmed  # type: ignore[method-assign]
    return passes


def lead_past_a_failure(group: RankGroup, settings: EngineSettings) -> tuple[Any, ...]:
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    assert isinstance(engine.runner, ModelRunner)
    passes = failing_early(engine.runner._forward)
    said = together(engine, PROMPTS)
    start(engine, PROMPTS[0])
    engine.step()
    cuda = simulated()
    was_under_way = cuda.issued > cuda.done
    engine.shut_down()
    return said, passes, was_under_way, cuda.issued == cuda.done


def follow_past_a_failure(group: RankGroup, settings: EngineSettings) -> list[bool]:
    with few_graphs():
        forward = load_forward_pass(settings, group)
    passes = failing_early(forward)
    follow(forward, group)
    return passes


@pytest.mark.slow
def test_step_that_ranks_cannot_launch_early_harms_nobody(gpu_ranks: Ranks, tmp_path: Path) -> None:
    """And no rank is dismissed while it exchanges with the first."""
    alone, shared = shared_by_two(tmp_path)
    expected = together(Engine.from_settings(alone), PROMPTS)
    [(said, passes, was_under_way, is_over), of_the_other] = gpu_ranks.run(
        lead_past_a_failure, follow_past_a_failure, shared
    )
    assert said == expected
    assert passes == of_the_other
    assert passes[: COUNT + 1] == [False, True, True, False, *[True] * (COUNT - 3)]
    assert was_under_way
    assert is_over


def lead_without_the_other(group: RankGroup, settings: EngineSettings) -> tuple[str, bool]:
    with few_graphs():
        engine = Engine.from_settings(settings, group)
    start(engine, PROMPTS[0])
    engine.step()
    was_under_way = engine._launched is not None
    try:
        run(engine)
    except Exception as error:
        return type(error).__name__, was_under_way
    return "", was_under_way


def leave_after_two_steps(group: RankGroup, settings: EngineSettings) -> None:
    with few_graphs():
        forward = load_forward_pass(settings, group)
    for _ in range(2):
        received = group.receive(forward.tables)
        assert isinstance(received, tuple)
        step, chosen = received
        with torch.inference_mode():
            forward.run(forward.prepare(step), chosen)
        group.passes += 1
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_rank_that_is_lost_while_a_step_is_under_way_is_noticed(tmp_path: Path) -> None:
    _, shared = shared_by_two(tmp_path)
    two = Ranks(2, on_gpus=True)
    try:
        assert two.lead(lead_without_the_other, leave_after_two_steps, shared) == ("RankLostError", True)
    finally:
        two.close()
