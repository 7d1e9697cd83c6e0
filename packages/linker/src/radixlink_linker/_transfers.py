"""The transfers of one lookup or load: at most one of each pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from radixlink_contracts import PoolName, PoolTransfer


def transfer_of(transfers: Iterable[PoolTransfer], pool: PoolName) -> PoolTransfer | None:
    """The transfer of a pool, where there is one."""
    return next((transfer for transfer in transfers if transfer.name is pool), None)
