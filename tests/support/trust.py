"""What workers and whoever asks them have in common in a test."""

from protos.trust import Trust

TRUST = Trust(token="a token of this test")
