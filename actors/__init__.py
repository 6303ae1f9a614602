"""Workers: a frontend that speaks gRPC, and its engine in a process of its own."""
