"""Use of Hypothesis: batches of calls against one service that lives through all batches."""

from collections.abc import Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.harness import Call, Harness

BATCH = 10  # calls at a time


def fuzz(harness: Harness, calls: SearchStrategy[Any], count: int, seed: int) -> None:
    """Runs at least ``count`` calls.

    A failing batch is not made smaller: its error names the call, and each attempt would start a service.
    """

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=-(-count // BATCH),
        phases=[Phase.reuse, Phase.generate],
        deadline=None,
        derandomize=False,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(st.lists(calls, min_size=BATCH, max_size=BATCH))
    def batch(calls: Sequence[Call]) -> None:
        harness.run(calls)

    batch()
