"""Compiled C++ functions for a CPU: operations of a forward pass."""
