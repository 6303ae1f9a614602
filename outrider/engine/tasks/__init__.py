"""Tasks: the tokens that a piece of work feeds in each step, and its use of the logits."""
