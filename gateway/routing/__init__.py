"""Routing: which drafter drafts each sequence, and how good the drafters are that do not draft it."""
