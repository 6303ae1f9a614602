"""The gateway speaks to clients and decodes their sequences with the workers. It imports no torch."""
