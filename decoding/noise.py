"""Keyed noise. Planned signatures; implementation follows.

words(keys, positions, rounds, purpose, vocab_size) -> int64 [num_rows, vocab_size], 32 random bits each
gumbel(keys, positions, vocab_size) -> float32 [num_rows, vocab_size]   (coupled rule: round 0, purpose CHOICE)
uniform(key, position, round, purpose) -> float in (0, 1)
"""
