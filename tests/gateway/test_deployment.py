"""The gateway as Serve builds it, and takes it down."""

import pytest

from gateway.deployment import Gateway
from gateway.settings import GatewaySettings
from protos.trust import Trust

TRUST = Trust(token="the token of a test")


def test_a_gateway_that_cannot_be_built_leaves_as_any_other():
    """Serve calls both by name: an error of the destructor would hide that of the constructor."""
    ended: list[bool] = []
    gateway = Gateway.__new__(Gateway)
    settings = GatewaySettings(model="m", tokenizer="no such tokenizer")
    with pytest.raises(Exception, match="no such tokenizer"):
        gateway.__init__(settings, TRUST, lambda: lambda: ended.append(True), [])
    gateway.__del__()
    assert ended == [True]


def test_a_gateway_that_cannot_be_traced_hides_no_error():
    def start_tracing():
        raise ValueError("no such exporter")

    gateway = Gateway.__new__(Gateway)
    with pytest.raises(ValueError, match="no such exporter"):
        gateway.__init__(GatewaySettings(model="m", tokenizer="t"), TRUST, start_tracing, [])
    gateway.__del__()
