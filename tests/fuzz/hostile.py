"""A draft worker that answers with arbitrary replies."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import grpc
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from actors.server import start_server
from gateway.workers.streams import WorkerInfo
from protos import rounds_pb2
from tests.fuzz.calls import HttpCall
from tests.fuzz.harness import COMPLETIONS
from tests.fuzz.messages import descriptor_of, message_of
from tests.fuzz.sessions import sampled_chains, trees
from tests.fuzz.values import graded
from tests.support.service import Service
from tests.support.trust import TRUST

DRAFT_WORKER = "outrider.rounds.v1.DraftWorker"
Reply = (
    dict[str, Any] | bytes | None
)  # without sequence, epoch and round those of the question; None ends the stream


@dataclass(frozen=True)
class Misled:
    """Makes a request whose Drafts come from a hostile worker, which further requests may use meanwhile."""

    replies: Sequence[Sequence[Reply]]  # to each Propose, over and over
    asked: HttpCall

    async def run(self, service: Service) -> str:
        """Raises AssertionError unless the request is answered nevertheless."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream, rounds_pb2.DraftWorkerRequests.FromString, None
        )
        handlers = grpc.method_handlers_generic_handler(DRAFT_WORKER, {"Stream": handler})
        server, address = await start_server(
            lambda server: server.add_generic_rpc_handlers((handlers,)), "127.0.0.1", TRUST
        )
        target = service.of("target")[0].published
        worker = WorkerInfo(
            "draft", "hostile", address, 0, "here", target.vocab_size, target.max_length, draft="model"
        )
        service.others.append(worker)
        try:
            return await self.asked.run(service)
        finally:
            service.others.remove(worker)
            await server.stop(None)

    async def _stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        replies = cycle(self.replies)
        async for several in requests:
            for request in several.requests:
                if request.WhichOneof("request") != "propose":
                    continue
                turn = request.propose.turn
                for reply in next(replies):
                    if reply is None:
                        return
                    if isinstance(reply, bytes):
                        yield reply
                        continue
                    names = {"sequence": request.sequence, "epoch": request.epoch, "round": turn.round}
                    answer = rounds_pb2.DraftReply(**{**names, **reply})
                    yield rounds_pb2.DraftReplies(replies=[answer]).SerializeToString()


def _replied(draft: dict[str, Any]) -> Reply:
    return {"proposed": {"draft": draft}}


@st.composite
def misled(draw: DrawFn) -> Misled:
    reply = st.one_of(
        graded(message_of(descriptor_of(rounds_pb2.DraftReply))),
        graded(message_of(descriptor_of(rounds_pb2.Draft))).map(_replied),
        (trees() | sampled_chains()).map(_replied),
        (trees() | sampled_chains()).map(lambda draft: {"prepared": {"draft": draft}}),
        st.binary(max_size=12),
        st.none(),
    )
    rule = draw(st.sampled_from(["coupled", "rejection", "block"]))
    mode = draw(st.sampled_from(["fixed", "fixed", "auto"]))
    speculation = {"mode": mode, "drafter": "model", "verification": rule}
    asked = HttpCall(COMPLETIONS, {"prompt": "def main(", "max_tokens": 12, "speculation": speculation})
    replies = draw(st.lists(st.lists(reply, min_size=0, max_size=3), min_size=1, max_size=4))
    return Misled(replies, asked)
