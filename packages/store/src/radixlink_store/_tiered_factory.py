"""Factories of stores with files behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from radixlink_store._file import FileStoreFactory
from radixlink_store._open_stores import OpenStores
from radixlink_store._page_log import PageLog
from radixlink_store._settings import PersistentSettings
from radixlink_store._tier_tally import TierTally
from radixlink_store._tiered import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from radixlink_contracts import PoolLayout, StoreConfig, StoreFactory


class TieredStoreFactory:
    """Puts files behind every store that another factory opens.

    Thread: as the other factory.
    """

    def __init__(self, memory: StoreFactory, settings: PersistentSettings) -> None:
        """Opens nothing yet.

        Args:
            memory: Opens the stores in front.
            settings: Where the files are, and how much of what.

        Owns: the other factory is closed with this one.
        """
        self._memory: Final = memory
        self._settings: Final = settings
        self._stores: Final[OpenStores[TieredStore]] = OpenStores("tiered store")

    def open(self, layout: PoolLayout) -> TieredStore:
        """Open the store of one layout, and find what files have of it.

        Raises:
            BackendUnavailableError: The directory of the files cannot be used.
            CapacityError: Not one page fits there.
            StaleHandleError: The factory was closed.
            LinkError: What the other factory raises.

        Ranks: as the other factory; the files are looked at locally, and what is wrong with them is
            raised where it is seen.
        Owns: the caller closes it; so does the factory's close.
        """
        self._stores.require_open()
        memory = self._memory.open(layout)
        tally = TierTally()
        try:
            log = PageLog(layout, self._settings, tally)
        except BaseException:
            memory.close()
            raise
        return self._stores.keep(TieredStore(memory, log, tally, self._settings))

    def close(self) -> None:
        """Close every store it opened, and the other factory. Idempotent.

        What waits to be written is, for `close_s` seconds at most for each store.
        """
        self._stores.close()
        self._memory.close()


def with_persistent_tier(
    make: Callable[[StoreConfig], StoreFactory], config: StoreConfig
) -> StoreFactory:
    """The factory that a configuration asks for: with files behind its stores, or without.

    Args:
        make: Makes the factory of the stores in front; it is given what concerns those.
        config: Says where the files are, if there are to be any.

    Raises:
        ContractError: It asks for what cannot work.
    """
    settings = PersistentSettings.of_config(config)
    if settings is None:
        return make(config)
    in_front = attrs.evolve(config, persistent_path="", persistent_bytes=0)
    return TieredStoreFactory(make(in_front), settings)


def file_stores(config: StoreConfig) -> StoreFactory:
    """What `file` means among `radixlink.stores`: segments, with files behind them if asked for.

    Raises:
        ContractError: The configuration asks for what cannot work.
    """
    return with_persistent_tier(FileStoreFactory, config)
