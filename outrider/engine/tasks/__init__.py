"""Tasks: what a piece of work feeds with a step, and what it makes of the logits."""
