"""Architectures that the fast decoder computes: each is a file and a row of the registry."""
