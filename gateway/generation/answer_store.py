"""Store of answers for ``draft_from``, ``previous_response_id`` and GET of /v1/responses.

It is in memory, bounded in bytes, and shared by all gateways of a service. No answer is written to a disk.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic_core import from_json, to_json

STORE = "answers"  # name of the actor that Serve keeps for the deployment of the gateway

logger = logging.getLogger(f"ray.serve.{__name__}")


class AnswerStore(Protocol):
    """Entries of answers by their id. A caller finds only its own answers."""

    async def put(self, caller: str, name: str, entry: bytes) -> None:
        """Stores an entry; drops the oldest entries if there are too many bytes."""

    async def get(self, caller: str, name: str) -> bytes | None:
        """Returns the entry of an id; None if there is none."""

    async def delete(self, caller: str, name: str) -> bool:
        """Removes an entry; returns False if there was none."""


class LocalAnswers:
    """Store in this process. Serve runs it as an actor if there are several gateways."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # oldest first

    async def put(self, caller: str, name: str, entry: bytes) -> None:
        """Stores an entry unless it is larger than the whole store."""
        if len(entry) > self._most_bytes:
            return
        self._entries[caller, name] = entry
        self._bytes += len(entry)
        while self._bytes > self._most_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= len(oldest)

    async def get(self, caller: str, name: str) -> bytes | None:
        return self._entries.get((caller, name))

    async def delete(self, caller: str, name: str) -> bool:
        entry = self._entries.pop((caller, name), None)
        self._bytes -= len(entry or b"")
        return entry is not None


class SharedAnswers:
    """Client of the store that all gateways share. No request fails if the store is lost."""

    async def put(self, caller: str, name: str, entry: bytes) -> None:
        await self._asked("put", caller, name, entry)

    async def get(self, caller: str, name: str) -> bytes | None:
        entry: bytes | None = await self._asked("get", caller, name)
        return entry

    async def delete(self, caller: str, name: str) -> bool:
        return bool(await self._asked("delete", caller, name))

    async def _asked(self, method: str, *given: Any) -> Any:
        """Returns the actor's answer; None if the actor is lost. Serve starts another, empty actor."""
        from ray import serve
        from ray.exceptions import RayError

        try:
            return await getattr(serve.get_deployment_actor(STORE), method).remote(*given)
        except (RayError, ValueError) as error:
            logger.warning("stored answers are lost: %s", error)
            return None


def answers_entry(answers: Iterable[Sequence[int]], **parts: Any) -> bytes:
    """Returns an entry of a store.

    Args:
        answers: token ids of each answer to a request, in their order.
        parts: further values to store with the answers.
    """
    return to_json({"answers": [list(answer) for answer in answers], **parts})


def answers_of(entry: bytes) -> list[tuple[int, ...]]:
    """Returns the token ids of each answer in an entry."""
    return [tuple(answer) for answer in from_json(entry)["answers"]]
