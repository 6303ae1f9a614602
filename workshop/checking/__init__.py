"""Tests whether two deployments give the same answers, and reports how they differ: ``outrider check``."""
