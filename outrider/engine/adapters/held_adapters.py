"""Adapters that an engine holds for its sequences: some are loaded and dropped while it serves."""

from dataclasses import dataclass, replace

from outrider.engine.adapters.adapters import Adapters
from outrider.engine.adapters.checkpoint import AdapterCheckpoint
from outrider.engine.parallel.adapter_change import AdapterChange
from outrider.engine.parallel.rank_group import RankGroup
from outrider.engine.sequence import SequenceAdapter
from outrider.engine.settings import EngineSettings
from outrider.engine.work import AskedAdapter


@dataclass
class _Held:
    adapter: SequenceAdapter
    sequences: int = 0  # number of open sequences that use it
    is_dropped: bool = False  # whether it is freed with its last sequence


class HeldAdapters:
    """Cache of loaded adapters by the digest of their files, at rank 0.

    A sequence names the files of its adapter, so a missing adapter is loaded when a sequence is opened. If
    the cache is full, the least recently used adapter without sequences is dropped first.
    """

    def __init__(self, adapters: Adapters, settings: EngineSettings, group: RankGroup | None = None) -> None:
        """adapters: adapters of this rank; the adapters of the settings are loaded already."""
        self._adapters, self._group = adapters, group
        self._most = settings.max_loaded_adapters
        first = len(settings.adapters) + 1
        self._numbers = [*reversed(range(first, first + self._most))]  # numbers that no adapter has
        self._held: dict[bytes, _Held] = {}  # key: digest; least recently used first

    def load(self, asked: AskedAdapter) -> bytes:
        """Loads an adapter, unless it is held; returns the digest of its files.

        Raises:
            UnsupportedModelError: it cannot be used, or all held adapters have open sequences.
        """
        checkpoint = self._adapters.read(asked)
        self._found(replace(asked, digest=checkpoint.digest), checkpoint).is_dropped = False
        return checkpoint.digest

    def drop(self, digest: bytes) -> None:
        """Drops an adapter once its last sequence has closed."""
        if (held := self._held.get(digest)) is not None:
            held.is_dropped = True
            self._free_unused(digest)

    def hold(self, asked: AskedAdapter) -> SequenceAdapter:
        """Returns the adapter for a sequence that opens. Raises ValueError, and as ``load``."""
        if not asked.path:
            return self._adapters.find(asked.name)
        held = self._found(asked)
        held.sequences += 1
        return held.adapter

    def release(self, adapter: SequenceAdapter) -> None:
        """Ends the use of an adapter by a sequence."""
        held = self._held.get(adapter.digest)
        if held is not None and held.adapter == adapter:  # otherwise the settings name it
            held.sequences -= 1
            self._free_unused(adapter.digest)

    def _found(self, asked: AskedAdapter, checkpoint: AdapterCheckpoint | None = None) -> _Held:
        """Returns the adapter with that digest, which is loaded if it is missing. Raises as ``load``.

        checkpoint: its checkpoint, if it has been read.
        """
        if (held := self._held.pop(asked.digest, None)) is None:
            held = self._loaded(asked, checkpoint or self._adapters.read(asked))
        self._held[asked.digest] = held
        return held

    def _loaded(self, asked: AskedAdapter, checkpoint: AdapterCheckpoint) -> _Held:
        if len(self._held) >= self._most:
            idle = next((digest for digest, held in self._held.items() if not held.sequences), None)
            if idle is None:
                raise checkpoint.refusal(
                    f"all target.max_loaded_adapters={self._most} have sequences under way: try it again"
                )
            self._free(idle)
        number = self._numbers[-1]
        if self._group is not None:
            self._group.send(AdapterChange(number, asked))
        self._adapters.add(number, lambda: checkpoint, self._group)
        self._numbers.pop()
        return _Held(SequenceAdapter(number, checkpoint.digest))

    def _free_unused(self, digest: bytes) -> None:
        if self._held[digest].is_dropped and not self._held[digest].sequences:
            self._free(digest)

    def _free(self, digest: bytes) -> None:
        number = self._held.pop(digest).adapter.number
        if self._group is not None:
            self._group.send(AdapterChange(number))
        self._adapters.drop(number)
        self._numbers.append(number)
