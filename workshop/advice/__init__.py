"""Tells which draft suits a target on the user's own prompts: ``outrider advise``.

The target answers the prompts once, by plain decoding. Under keyed noise a guess is correct if it is what the
target said. So every candidate is judged on these answers, and the target is not asked again.
"""
