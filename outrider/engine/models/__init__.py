"""Architectures that the fast decoder supports: each is a file and a row of the registry."""
