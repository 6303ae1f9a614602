"""Store of loaded adapters in the memory of the test."""

from gateway.adapter import Adapter


class MemoryAdapterStore:
    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}

    async def all(self) -> dict[str, Adapter]:
        return dict(self.adapters)

    async def put(self, adapter: Adapter, *, replaces: bool) -> bool:
        if adapter.name in self.adapters and not replaces:
            return False
        self.adapters[adapter.name] = adapter
        return True

    async def delete(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None
