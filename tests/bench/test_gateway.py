"""The benchmark of the gateway's own work: every answer goes through, in every mode."""

import asyncio

import pytest

from bench.gateway import LATE, MODES, measure


@pytest.mark.parametrize("mode", MODES)
def test_gateway_benchmark_measures_whole_answers_in_every_mode(mode: str) -> None:
    row = asyncio.run(measure(3, MODES[mode], answer_tokens=24, steps=64))
    assert row["us a token"] > 0.0
    most = {"plain": 1, "plain, late": LATE}
    if mode in most:
        assert row["tokens a chunk"] == pytest.approx(most[mode], rel=0.3)
    else:
        assert row["tokens a chunk"] > 1.0
