"""Which sequences take part in a step, and how long a step waits for more."""
