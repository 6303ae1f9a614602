"""LoRA adapters that requests may choose: adapters of the settings, and adapters that requests loaded."""

import re

from gateway.adapter import NO_ADAPTER, Adapter
from gateway.errors import ForbiddenError, InvalidRequestError, UnknownModelError
from gateway.settings import GatewaySettings
from gateway.workers.adapter_store import AdapterStore
from gateway.workers.fleet import Fleet

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class ServedAdapters:
    """Adapters by name. A gateway does not cache them, so a removed adapter is refused at once."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet, store: AdapterStore | None) -> None:
        """store: adapters that requests have loaded; None: requests load none."""
        self._settings = settings
        self._fleet = fleet
        self._store = store

    async def served(self) -> dict[str, Adapter]:
        """Returns the adapters by name."""
        loaded = {} if self._store is None else await self._store.all()
        return {name: Adapter(name) for name in self._settings.adapters} | loaded

    async def find(self, model: str | None) -> Adapter:
        """Returns the adapter that a request for this model chooses; None: the request names no model.

        Raises:
            UnknownModelError: it is neither the served model nor an adapter.
        """
        if model is None or model == self._settings.model:
            return NO_ADAPTER
        served = await self.served()
        if (found := served.get(model)) is None:
            are = "are" if served else "is"
            names = " and ".join(map(repr, (self._settings.model, *served)))
            raise UnknownModelError("model", f"{model!r} is not served, {names} {are}")
        return found

    async def load(self, name: str, path: str, *, in_place: bool) -> None:
        """Loads an adapter at all targets, or at none.

        Args:
            path: folder within ``target.adapter_folder``.
            in_place: whether it may replace an adapter that was loaded under its name.

        Raises:
            ForbiddenError: requests may not load adapters.
            InvalidRequestError: the name is taken or malformed, too many are loaded, or a target refuses it.
            WorkerLostError: a target, or Ray's head, does not answer.
        """
        store = self._changeable()
        if NAME.fullmatch(name) is None:
            raise InvalidRequestError("lora_name", f"{name!r} does not match ^{NAME.pattern}$")
        self._check_of_requests(name)
        loaded = await store.all()
        if name in loaded and not in_place:
            raise _taken(name)
        if name not in loaded:
            self._check_count(name, len(loaded) + 1)
        adapter = await self._fleet.load_adapter(Adapter(name, path))
        if not await store.put(adapter, replaces=in_place):  # another request has taken the name first
            await self._fleet.drop_adapter(adapter)
            raise _taken(name)
        now = await store.all()
        if len(now) > self._settings.max_loaded_adapters:  # other adapters were loaded meanwhile
            await store.delete(name)
            await self._fleet.drop_adapter(adapter)
            self._check_count(name, len(now))
        before = loaded.get(name, adapter)
        if before.digest != adapter.digest:
            await self._fleet.drop_adapter(before)

    async def unload(self, name: str) -> None:
        """Withdraws an adapter from new requests; targets drop it once its last sequence has closed.

        Raises:
            ForbiddenError: requests may not load or unload adapters.
            InvalidRequestError: the settings name it.
            UnknownModelError: no adapter has the name.
            WorkerLostError: Ray's head does not answer.
        """
        store = self._changeable()
        self._check_of_requests(name)
        loaded = await store.all()
        if name not in loaded or not await store.delete(name):
            names = ", ".join(map(repr, loaded)) or "none"
            raise UnknownModelError("lora_name", f"{name!r} is not loaded, there are {names}")
        await self._fleet.drop_adapter(loaded[name])

    def _changeable(self) -> AdapterStore:
        if self._store is None:
            raise ForbiddenError(
                "adapters are loaded at the start alone: target.adapter_folder names a folder from which"
                " requests may load them"
            )
        return self._store

    def _check_of_requests(self, name: str) -> None:
        if name in (self._settings.model, *self._settings.adapters):
            raise InvalidRequestError("lora_name", f"{name!r} is of the settings: give another name")

    def _check_count(self, name: str, count: int) -> None:
        if count > (most := self._settings.max_loaded_adapters):
            raise InvalidRequestError(
                "lora_name",
                f"{name!r} would be one more than target.max_loaded_adapters={most}: unload one first",
            )


def _taken(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        "lora_name", f"{name!r} is loaded already: load_inplace=true replaces it, or give another name"
    )
