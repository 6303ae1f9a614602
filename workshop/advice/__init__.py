"""Recommends a draft for a target, judged on the user's own prompts: ``outrider advise``.

The target answers the prompts once, by plain decoding. Under keyed noise a guess is correct if it equals the
target's own token. So every candidate is judged on these answers; they are never generated again.
"""
