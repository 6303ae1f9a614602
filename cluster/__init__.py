"""Composition. ``serve run cluster.app`` looks for the attribute ``app`` here."""

from cluster.application import app

__all__ = ["app"]
