"""Compiled functions for a processor: what a forward pass computes in float32."""
