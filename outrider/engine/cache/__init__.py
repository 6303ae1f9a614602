"""Paged KV cache: the blocks that each sequence holds, and the prefixes that sequences share."""
