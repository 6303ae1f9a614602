"""Choice of tokens: from logits to tokens, log-probabilities and verdicts."""
