"""Drafting and verifying in one process, without a service: for advice, benchmarks and tests."""
