"""Makes the demo pair and its drafters from scratch, on a CPU."""
