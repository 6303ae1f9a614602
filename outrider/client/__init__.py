"""A Python client of the gRPC API, which repeats a broken request with its seed."""
