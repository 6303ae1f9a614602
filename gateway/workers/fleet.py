"""Which workers exist, and a stream to one of them. Nothing polls: Serve pushes the table."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from gateway.errors import WorkerLostError
from gateway.sequence import GatewaySequence
from gateway.workers.prefixes import Prefixes
from gateway.workers.streams import Link, Role, WorkerInfo, WorkerStream
from outrider.decoding.settings import Sampling
from protos import rounds_pb2
from protos.trust import Trust

TargetStream = WorkerStream[rounds_pb2.TargetRequest, rounds_pb2.TargetReply]
DraftStream = WorkerStream[rounds_pb2.DraftRequest, rounds_pb2.DraftReply]

TARGET = ""  # in place of a draft's name
IMBALANCE = 4  # sequences by which a worker that holds the prefix may be busier than the least busy one


class Fleet:
    """``workers`` gives those that exist at the moment of asking."""

    def __init__(self, workers: Callable[[], Iterable[WorkerInfo]], trust: Trust) -> None:
        self._workers = workers
        self._trust = trust
        self._links: dict[str, Link] = {}  # by address
        self._prefixes: dict[str, Prefixes] = defaultdict(Prefixes)  # by draft, as ``WorkerInfo.draft`` says
        self._closing: set[asyncio.Task[None]] = set()
        self._isolated: dict[str, TargetStream] = {}  # by address

    def workers(self, role: Role | None = None) -> list[WorkerInfo]:
        return [worker for worker in self._workers() if role in (None, worker.role)]

    def links(self) -> list[Link]:
        """A connection to every worker that exists; those to others are closed."""
        workers = {worker.address: worker for worker in self._workers()}
        for address in self._links.keys() - workers.keys():
            if self._links[address].streams == 0:
                closing = asyncio.create_task(self._links.pop(address).aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for address in workers.keys() - self._links.keys():
            self._links[address] = Link(workers[address], self._trust)
        return [self._links[address] for address in workers]

    def open_target(self, sequence: GatewaySequence, *, isolated: bool = False) -> TargetStream:
        """
        isolated: a target was lost with the sequence, perhaps by it. Of such sequences a target gets one at a
            time, until the first token: one that ends its target does not take the others along again.

        Raises:
            WorkerLostError: there is no target, or none for a sequence that is to be apart.
        """
        link = self._choose(TARGET, sequence, self._suspected() if isolated else ())
        stream = TargetStream(link, rounds_pb2.TargetRequest, sequence, sequence.sampling)
        if isolated:
            self._isolated[stream.address] = stream
        return stream

    def cleared(self, stream: TargetStream) -> None:
        """A token came over the stream: it need not be apart any more."""
        if self._isolated.get(stream.address) is stream:
            del self._isolated[stream.address]

    def _suspected(self) -> Collection[str]:
        """Addresses of targets where a sequence is apart."""
        self._isolated = {at: stream for at, stream in self._isolated.items() if not stream.is_closed}
        return self._isolated

    def open_draft(self, draft: str, sequence: GatewaySequence) -> DraftStream:
        """Raises WorkerLostError if there is no worker with the draft of that name."""
        link = self._choose(draft, sequence)
        sampling = _as_drafted(sequence.sampling, range(self.vocab_size(), link.worker.vocab_size))
        return DraftStream(link, rounds_pb2.DraftRequest, sequence, sampling)

    def vocab_size(self) -> int:
        """Of the ids that all workers know; 0 without any."""
        return min((worker.vocab_size for worker in self._workers()), default=0)

    def _choose(self, draft: str, sequence: GatewaySequence, taken: Collection[str] = ()) -> Link:
        """Where the prompt's beginning is cached, unless that worker is much busier than another.

        Args:
            draft: name of the one that is looked for, or TARGET.
            taken: addresses of workers that do not come into question.
        """
        links = [link for link in self.links() if link.worker.draft == draft]
        links = [link for link in links if link.worker.address not in taken]
        if not links:
            kind = f"worker of draft {draft!r}" if draft else "target worker"
            raise WorkerLostError(f"no {kind} is ready{', that is not on trial' if taken else ''}")
        # Where workers differ the sequence goes to one that holds all of it.
        links = [link for link in links if link.worker.max_length >= sequence.limit] or links
        now = asyncio.get_running_loop().time()
        trusted = [link for link in links if link.suspect_until <= now]
        chosen = min(trusted or links, key=lambda link: link.busy(now))
        if len(trusted) > 1:
            holder = self._prefixes[draft].holder(sequence.prompt)
            holding = next((link for link in trusted if link.worker.address == holder), chosen)
            if holding.busy(now) <= chosen.busy(now) + IMBALANCE:
                chosen = holding
        self._prefixes[draft].note(sequence.prompt, chosen.worker.address)
        return chosen

    async def close(self) -> None:
        for link in [*self._links.values()]:  # streams that are still read may find others meanwhile
            await link.aclose()


def _as_drafted(sampling: Sampling, only_drafts: range) -> Sampling:
    """Without what the target alone tells, and without ids that it lacks.

    only_drafts: these ids: a draft's embeddings may be padded further than the target's.
    """
    banned = (*sampling.bad_token_ids, *only_drafts)
    return sampling.model_copy(update={"logprobs": None, "bad_token_ids": banned})
