"""Paged cache of keys and values: which blocks a sequence holds, and what they share."""
