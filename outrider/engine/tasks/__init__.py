"""Tasks: tokens that a piece of work feeds in a step, and what follows from the logits."""
