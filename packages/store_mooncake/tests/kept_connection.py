"""A factory for processes that run one case after the other: one connection for all of their life.

As an engine has it. A connection takes a second; closing the factory closes its stores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from typing_extensions import override

from radixlink_contracts import StoreConfig, StoreFactory
from radixlink_store_mooncake import MooncakeStoreFactory

if TYPE_CHECKING:
    from radixlink_contracts import PageStore, PoolLayout


@functools.cache
def _connection(location: str) -> MooncakeStoreFactory:
    return MooncakeStoreFactory(StoreConfig(location=location))


class KeptConnection(StoreFactory):
    """Opens stores on the connection of this process."""

    def __init__(self, config: StoreConfig) -> None:
        self._location = config.location
        self._stores: list[PageStore] = []

    @override
    def open(self, layout: PoolLayout) -> PageStore:
        self._stores.append(_connection(self._location).open(layout))
        return self._stores[-1]

    @override
    def close(self) -> None:
        for store in self._stores:
            store.close()
