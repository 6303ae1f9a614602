"""A gateway whose text is written down beforehand, for clients of the gRPC API."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from protos import generation_pb2, generation_pb2_grpc

CHUNKS = [([5], ["The "]), ([6, 7, 8], ["c", "", "ä"]), ([9], ["t"]), ([10, 11], [" s", "at"])]
TEXT = "The cät sat"
TOKENS = [5, 6, 7, 8, 9, 10, 11]
SEED = 77


class TextGateway(generation_pb2_grpc.GenerationServicer):
    """Answers from CHUNKS, cut differently in every attempt; breaks as its script says."""

    def __init__(self) -> None:
        self.breaks: list[int] = []  # chunks after which each attempt in turn breaks
        self.code, self.details = grpc.StatusCode.UNAVAILABLE, "gone"
        self.seeds: list[int | None] = []
        self.metadata: dict[str, str] = {}
        self.schemas: list[str] = []
        self.prompts: list[str] = []
        self.chats: list[list[tuple[str, str]]] = []  # roles and texts
        self.retry_after_ms: int | None = None  # told with its errors

    def Generate(self, request, context) -> Iterator[generation_pb2.GenerateChunk]:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        self.schemas.append(request.structured_outputs.json)
        self.prompts.append(request.text)
        self.chats.append([(message.role, message.content) for message in request.chat.messages])
        self.seeds.append(request.sampling.seed if request.sampling.HasField("seed") else None)
        breaks_after = self.breaks.pop(0) if self.breaks else None
        tokens = [pair for ids, texts in CHUNKS for pair in zip(ids, texts, strict=True)]
        size = len(self.seeds)
        chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        for number, chunk in enumerate(chunks):
            if number == breaks_after:
                if self.retry_after_ms is not None:
                    context.set_trailing_metadata([("retry-after-ms", str(self.retry_after_ms))])
                context.abort(self.code, self.details)
            is_last = number == len(chunks) - 1
            yield generation_pb2.GenerateChunk(
                token_ids=[id_ for id_, _ in chunk],
                origins=[generation_pb2.ORIGIN_ACCEPTED] * len(chunk),
                text="".join(text for _, text in chunk),
                text_lengths=[len(text) for _, text in chunk],
                seed=SEED if number == 0 else None,
                finish_reason="length" if is_last else None,
                usage=generation_pb2.Usage(completion_tokens=len(tokens)) if is_last else None,
            )


@contextmanager
def serving(gateway: TextGateway) -> Iterator[tuple[TextGateway, str]]:
    """The gateway, and its host:port."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield gateway, f"127.0.0.1:{port}"
    server.stop(None).wait()
