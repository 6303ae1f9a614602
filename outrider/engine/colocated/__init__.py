"""A draft model in the process of the target, with its own engine and cache."""
