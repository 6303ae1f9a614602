"""The loop of a sequence: its phases at a target, its lease, the source of its Drafts, its counters."""
