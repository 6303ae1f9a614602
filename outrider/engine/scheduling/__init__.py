"""Selection of the sequences of a step, and the delay of a step until more sequences are ready."""
