"""Generates the tables in the docs that follow from code: settings, metrics and models."""
