"""The fingerprint of a target tells whether a seed still gives the same text."""

from dataclasses import replace

import pytest

from gateway.workers.streams import WorkerInfo

TOLD = WorkerInfo(
    "target", "m", "a:1", 1, "node", 256, 2048, promise="exactly", settings={"quantization": None}
)


@pytest.mark.parametrize(
    "changed", [{"model": "n"}, {"promise": "up to rounding"}, {"settings": {"quantization": "int8"}}]
)
def test_fingerprint_of_another_model_or_numerics_is_another(changed):
    assert replace(TOLD, **changed).fingerprint != TOLD.fingerprint


def test_fingerprint_of_a_replica_is_the_same():
    assert replace(TOLD, address="b:1", pid=2, node="other").fingerprint == TOLD.fingerprint
