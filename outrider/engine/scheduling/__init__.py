"""Selection of the sequences of a step, and the wait of a step for more sequences."""
