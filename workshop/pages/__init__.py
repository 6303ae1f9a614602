"""Writes the tables of the docs that the code knows: settings and metrics."""
