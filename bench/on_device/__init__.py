"""Benchmarks for a lent GPU: prepared elsewhere, run within minutes, each figure kept as it comes."""
