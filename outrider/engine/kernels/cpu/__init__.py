"""Compiled functions for a processor: operations of a forward pass."""
