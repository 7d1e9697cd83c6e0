"""What the name `mpi` means among `radixlink.stores`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlink_store import with_persistent_tier
from radixlink_store_mpi._factory import MpiStoreFactory

if TYPE_CHECKING:
    from radixlink_contracts import StoreConfig, StoreFactory


def mpi_stores(config: StoreConfig) -> StoreFactory:
    """Stores in windows, with files behind them if a configuration asks for them.

    Raises:
        ContractError: It asks for what cannot work.
        BackendUnavailableError: It names a location.

    Ranks: local; what it makes opens stores as `MpiStoreFactory` does.
    """
    return with_persistent_tier(MpiStoreFactory, config)
