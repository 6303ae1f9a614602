"""Python client of the gRPC API, which repeats an interrupted request with its seed."""
