"""Plan before anything is loaded: memory, costs of a step, what is promised."""
