"""Metrics of a worker for Serve's autoscaler. Imports nothing: Serve's controller reads the names too."""

SEQUENCES = "sequences"  # open ones: running, waiting, between two rounds
CACHE_IN_USE = "cache_in_use"  # share of the blocks
