"""The stores that a factory has opened: they are closed with it, also one that comes late."""

from __future__ import annotations

from typing import Final, Generic, Protocol, TypeVar

from radixlink_contracts.errors import StaleHandleError
from radixlink_store._process_mutex import ProcessMutex


class _Closable(Protocol):
    def close(self) -> None:
        """End it. Idempotent."""
        ...


_Store = TypeVar("_Store", bound=_Closable)


class OpenStores(Generic[_Store]):
    """Those of one factory, which is open until they are closed.

    Thread: any.
    """

    def __init__(self, what: str) -> None:
        """Start with none.

        Args:
            what: Whose they are, for a message.
        """
        self._what: Final = what
        self._mutex: Final = ProcessMutex()
        self._stores: list[_Store] = []
        self._closed = False

    def require_open(self) -> None:
        """Return while the factory is open.

        Raises:
            StaleHandleError: It was closed.
        """
        if self._closed:
            raise StaleHandleError(f"{self._what}: expected an open factory, got a closed one")

    def keep(self, store: _Store) -> _Store:
        """Close a store with the factory; at once if that was closed while the store was opened.

        Raises:
            StaleHandleError: It was.
        """
        with self._mutex.lock:
            if not self._closed:
                self._stores.append(store)
                return store
        store.close()
        self.require_open()
        return store

    def close(self) -> None:
        """Close all, and the factory. Idempotent."""
        with self._mutex.lock:
            self._closed = True
            stores, self._stores = self._stores, []
        for store in stores:
            store.close()
