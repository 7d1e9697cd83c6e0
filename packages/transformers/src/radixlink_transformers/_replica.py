"""`ReplicaStore`: the store of a rank that has the same pages as rank 0, which stores them for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from radixlink_contracts import PageBits, PageStore, Touchable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageHandles, PageKeys, PoolLayout


class ReplicaStore(PageStore, Touchable):
    """Another store, into which this rank puts nothing: rank 0 puts the same.

    It says that all is stored. Whether it is, rank 0 says: what a rank failed to store, the ranks
    agree that it is not.
    """

    def __init__(self, store: PageStore) -> None:
        """Stand before this store. Owns: `close` closes it."""
        self._store: Final = store

    @property
    @override
    def layout(self) -> PoolLayout:
        return self._store.layout

    @override
    def contains(self, keys: PageKeys) -> PageBits:
        return self._store.contains(keys)

    @override
    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        return self._store.open(keys, ttl_s)

    @override
    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        return self._store.read(handles, layer_range, out)

    @override
    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        return PageBits.all(len(keys))

    @override
    def touch(self, keys: PageKeys) -> PageBits:
        return self._store.contains(keys)

    @override
    def close(self) -> None:
        self._store.close()
