"""Programs to read and to run: the algorithm in one function, and a client."""
