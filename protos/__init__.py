"""Messages between processes: the public API, the rounds, and their conversions."""
