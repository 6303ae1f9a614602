"""The demo pair: checkpoints of a small target and its drafters, and prompts for them."""
