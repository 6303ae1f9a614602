"""What the end of a stream between gateway and worker says beyond its messages."""

import grpc

# Initial metadata, sent as soon as a worker has read Open: what breaks later broke with the sequence.
TAKEN = ("outrider-taken", "1")

# Two codes that gRPC never gives by itself.
FAILED = grpc.StatusCode.DATA_LOSS  # the engine cannot go on with this sequence, and is well otherwise
LEAVING = grpc.StatusCode.ABORTED  # the worker is drained: go on elsewhere
