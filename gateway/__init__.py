"""Gateway: serves clients and generates their sequences with the workers. It imports no torch."""
