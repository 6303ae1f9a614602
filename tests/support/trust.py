"""Shared secret of workers and their callers in tests."""

from protos.trust import Trust

TRUST = Trust(token="a token of this test")
