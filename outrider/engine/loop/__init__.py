"""Loop of an engine: work in, steps, results out."""
