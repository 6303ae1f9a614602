"""The simulated service: the same code, steps from a table, time that costs nothing."""

import asyncio
import time
from dataclasses import replace

import pytest

from bench import virtual
from bench.simulate import ACCEPTANCE, MODES, PAIRS, Load, closed_loop
from bench.simulated_engine import Hardware
from decoding.pace.cost import StepSize

FAST_DRAFT = PAIRS["1B in 4 bit on an L4"]
LOAD = Load(streams=2, prompt_tokens=64, answer_tokens=64, warm_s=2.0, counted_s=4.0)


def rate(mode: str, load: Load = LOAD) -> float:
    return virtual.run(closed_loop(FAST_DRAFT, ACCEPTANCE, MODES[mode], load)).rate(load)


def test_an_hour_takes_no_time():
    begun = time.monotonic()
    virtual.run(asyncio.sleep(3600))
    assert time.monotonic() - begun < 1.0


def test_who_waits_for_ever_is_told_so():
    with pytest.raises(RuntimeError, match="everybody waits"):
        virtual.run(asyncio.Event().wait())


def test_plain_decoding_takes_a_step_a_token():
    target, _ = FAST_DRAFT
    step = target.seconds(StepSize(2, 2, context_tokens=200))
    assert rate("plain") == pytest.approx(2 / step, rel=0.05)


def test_it_is_the_same_every_time():
    assert rate("pace") == rate("pace")


def test_drafts_pay_where_the_target_reads_its_weights_for_one_token_as_for_five():
    load = replace(LOAD, streams=1, counted_s=10.0)
    assert rate("fixed 2", load) > 1.1 * rate("plain", load)
    assert rate("pace", load) > 1.1 * rate("plain", load)


def test_a_roofline_is_the_longer_of_reading_and_computing():
    hardware = Hardware(
        weight_bytes=100.0,
        bytes_per_s=10.0,
        flops_per_token=1.0,
        flops_per_s=1.0,
        cache_bytes_per_token=1.0,
        constant_s=0.5,
    )
    assert hardware.seconds(StepSize(1, 1)) == 10.5
    assert hardware.seconds(StepSize(1, 1, context_tokens=50)) == 15.5
    assert hardware.seconds(StepSize(1, 20, prompt_tokens=10)) == 30.5
