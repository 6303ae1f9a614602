"""Workers that exist, and streams to them. There is no polling: Serve pushes the table of workers."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from gateway.adapter import NO_ADAPTER, Adapter
from gateway.errors import InvalidRequestError, WorkerLostError
from gateway.sequence import GatewaySequence
from gateway.workers.prefixes import Prefixes
from gateway.workers.streams import Link, Role, WorkerInfo, WorkerStream
from protos import rounds_pb2
from protos.trust import Trust

logger = logging.getLogger(f"ray.serve.{__name__}")

TargetStream = WorkerStream[rounds_pb2.TargetWorkerRequest, rounds_pb2.TargetReply]
DraftStream = WorkerStream[rounds_pb2.DraftWorkerRequest, rounds_pb2.DraftReply]

TARGET = ""  # in place of a draft's name
IMBALANCE = 4  # sequences by which a worker with the prefix may exceed the least busy worker


class Fleet:
    """Chooses workers and opens streams. ``workers`` returns the workers that exist at that moment."""

    def __init__(self, workers: Callable[[], Iterable[WorkerInfo]], trust: Trust) -> None:
        self._workers = workers
        self._trust = trust
        self._links: dict[str, Link] = {}  # key: address
        # Key: WorkerInfo.draft, and for a target the adapter, since each adapter has its own prefix cache.
        self._prefixes: dict[tuple[str, Adapter], Prefixes] = defaultdict(Prefixes)
        self._closing: set[asyncio.Task[None]] = set()
        self._isolated: dict[str, TargetStream] = {}  # key: address

    def workers(self, role: Role | None = None) -> list[WorkerInfo]:
        return [worker for worker in self._workers() if role in (None, worker.role)]

    def targets(self) -> list[WorkerInfo]:
        """Returns the targets, at least one.

        Raises:
            WorkerLostError: no target is ready.
        """
        if not (targets := self.workers("target")):
            raise WorkerLostError("no target worker is ready")
        return targets

    def links(self) -> list[Link]:
        """Returns a link to every existing worker, and closes idle links to workers that are gone."""
        workers = {worker.address: worker for worker in self._workers()}
        for address in self._links.keys() - workers.keys():
            if self._links[address].streams == 0:
                closing = asyncio.create_task(self._links.pop(address).aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        for address in workers.keys() - self._links.keys():
            self._links[address] = Link(workers[address], self._trust)
        return [self._links[address] for address in workers]

    def open_target(self, sequence: GatewaySequence, *, is_isolated: bool = False) -> TargetStream:
        """Opens the sequence at a target.

        is_isolated: the sequence was running when a target was lost, and may be the cause. A target gets at
            most one isolated sequence until its first token, so another loss affects no other such sequence.

        Raises:
            WorkerLostError: there is no target, or every target has an isolated sequence.
        """
        link = self._choose(TARGET, sequence, self._with_isolated() if is_isolated else ())
        stream = _target_stream(link, sequence, is_isolated=is_isolated)
        if is_isolated:
            self._isolated[stream.address] = stream
        sequence.served_by.append(stream.address)
        return stream

    def open_second(self, sequence: GatewaySequence, link: Link) -> TargetStream:
        """Opens the sequence at a second target, while it stays open at the first target."""
        return _target_stream(link, sequence)

    def second_targets(self, sequence: GatewaySequence, first: Link) -> list[Link]:
        """Returns the targets that would continue with the same text, the least busy target first."""
        now = asyncio.get_running_loop().time()
        isolated = self._with_isolated()
        found = [
            link
            for link in self._target_links()
            if link is not first
            and link.worker.model == first.worker.model
            and link.worker.is_exact
            and first.worker.is_exact
            and link.worker.max_length >= sequence.limit
            and link.worker.address not in isolated
            and link.suspect_until <= now
            and not link.is_leaving
        ]
        return sorted(found, key=lambda link: link.num_sequences(now))

    def open_audit(self, sequence: GatewaySequence) -> TargetStream | None:
        """Opens a complete answer at the least busy target that has not served it; None if there is none."""
        others = [
            link
            for link in self._target_links()
            if link.worker.address not in sequence.served_by and not link.is_leaving
        ]
        if not others:
            return None
        now = asyncio.get_running_loop().time()
        link = min(others, key=lambda link: (link.suspect_until > now, link.num_sequences(now)))
        sampling = sequence.sampling.model_copy(update={"logprobs": None})
        again = GatewaySequence(
            sequence.prompt, sampling, sequence.noise_key, sequence.generated, adapter=sequence.adapter
        )
        return _target_stream(link, again)

    async def load_adapter(self, adapter: Adapter) -> Adapter:
        """Loads an adapter at all targets; returns it with the digest of its files.

        Raises:
            InvalidRequestError: a target refuses it, or targets find different files. Then all targets drop
                it.
            WorkerLostError: there is no target, or a target does not answer. Then all other targets drop it.
        """
        self.targets()  # raises WorkerLostError if there is no target
        loads = await asyncio.gather(
            *[link.load_adapter(adapter) for link in self._target_links()], return_exceptions=True
        )
        errors = [load for load in loads if isinstance(load, BaseException)]
        loaded = {load for load in loads if isinstance(load, Adapter)}
        if len(loaded) > 1:
            errors.append(InvalidRequestError("lora_path", f"{adapter.path!r} differs from target to target"))
        if errors:
            for one in loaded:
                await self.drop_adapter(one)
            raise errors[0]
        return loaded.pop()

    async def drop_adapter(self, adapter: Adapter) -> None:
        """Drops an adapter at all targets that answer, once no open sequence has it."""
        await asyncio.gather(
            *[link.drop_adapter(adapter) for link in self._target_links()], return_exceptions=True
        )

    def cleared(self, stream: TargetStream) -> None:
        """Ends the isolation of a sequence: a token came over its stream."""
        if self._isolated.get(stream.address) is stream:
            del self._isolated[stream.address]

    def _target_links(self) -> list[Link]:
        return [link for link in self.links() if link.worker.role == "target"]

    def _with_isolated(self) -> Collection[str]:
        """Returns the addresses of targets that have an isolated sequence."""
        self._isolated = {at: stream for at, stream in self._isolated.items() if not stream.is_closed}
        return self._isolated

    def open_draft(self, draft: str, sequence: GatewaySequence, *, is_isolated: bool = False) -> DraftStream:
        """Opens the sequence at a worker that holds the draft. Raises WorkerLostError if there is none.

        is_isolated: a worker was lost with the sequence, which may be the cause.
        """
        link = self._choose(draft, sequence)
        # The target lacks these tokens: a draft's embeddings may be padded further than the target's.
        banned = (*sequence.sampling.bad_token_ids, *range(self.vocab_size(), link.worker.vocab_size))
        sampling = sequence.sampling.model_copy(update={"logprobs": None, "bad_token_ids": banned})
        return DraftStream(link, rounds_pb2.DraftWorkerRequest, sequence, sampling, is_isolated=is_isolated)

    def vocab_size(self) -> int:
        """Returns the number of token ids that all workers know; 0 without workers."""
        return min((worker.vocab_size for worker in self._workers()), default=0)

    def _choose(self, draft: str, sequence: GatewaySequence, excluded: Collection[str] = ()) -> Link:
        """Returns the worker that caches the prompt's prefix, or a much less busy worker.

        Args:
            draft: name of the draft that the worker must hold, or TARGET.
            excluded: addresses of workers that must not get the sequence.
        """
        links = [link for link in self.links() if link.worker.draft == draft]
        links = [link for link in links if link.worker.address not in excluded]
        if not links:
            kind = f"worker of draft {draft!r}" if draft else "target worker"
            raise WorkerLostError(f"no {kind} is ready{' that has no isolated sequence' if excluded else ''}")
        # If the workers' contexts differ, the sequence goes to a worker whose context holds all of it.
        links = [link for link in links if link.worker.max_length >= sequence.limit] or links
        now = asyncio.get_running_loop().time()
        well = [link for link in links if link.suspect_until <= now and not link.is_leaving]
        chosen = min(well or links, key=lambda link: link.num_sequences(now))
        prefixes = self._prefixes[draft, NO_ADAPTER if draft else sequence.adapter]
        if len(well) > 1:
            holder = prefixes.holder(sequence.prompt)
            holding = next((link for link in well if link.worker.address == holder), chosen)
            if holding.num_sequences(now) <= chosen.num_sequences(now) + IMBALANCE:
                chosen = holding
        prefixes.note(sequence.prompt, chosen.worker.address)
        logger.debug("sequence %d goes to %s, of %d", sequence.number, chosen.place, len(links))
        return chosen

    async def close(self) -> None:
        for link in [*self._links.values()]:  # a copy: streams that are still read may add links meanwhile
            await link.aclose()


def _target_stream(link: Link, sequence: GatewaySequence, *, is_isolated: bool = False) -> TargetStream:
    """Opens the sequence at a target, with the sequence's own settings and adapter."""
    return TargetStream(
        link,
        rounds_pb2.TargetWorkerRequest,
        sequence,
        sequence.sampling,
        is_isolated=is_isolated,
        adapter=sequence.adapter,
    )
